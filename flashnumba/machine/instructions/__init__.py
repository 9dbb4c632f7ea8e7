"""Machine instructions by name, one file a family. See :mod:`flashnumba.machine.instruction` for what a declaration is."""

from flashnumba.machine.instructions.convert import *
from flashnumba.machine.instructions.ldmatrix import *
from flashnumba.machine.instructions.memory import *
from flashnumba.machine.instructions.mma import *
from flashnumba.machine.instructions.ordered import *
from flashnumba.machine.instructions.special import *
