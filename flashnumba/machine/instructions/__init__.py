"""Machine instructions by name, one file a family; :mod:`flashnumba.machine.instruction` says what a declaration is."""

# ruff: noqa: F403

from flashnumba.machine.instructions.barrier import *
from flashnumba.machine.instructions.convert import *
from flashnumba.machine.instructions.cp_async import *
from flashnumba.machine.instructions.dependency import *
from flashnumba.machine.instructions.ldmatrix import *
from flashnumba.machine.instructions.mbarrier import *
from flashnumba.machine.instructions.memory import *
from flashnumba.machine.instructions.mma import *
from flashnumba.machine.instructions.ordered import *
from flashnumba.machine.instructions.special import *
from flashnumba.machine.instructions.tma import *
from flashnumba.machine.instructions.warp import *
from flashnumba.machine.instructions.wgmma import *
