"""Instructions counted in nvdisasm's text, and the loop that has the products."""

from __future__ import annotations

import pytest

from flashnumba.machine.listing import machine_code, main_loop

TEXT = """
.text.kernel:
        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R8, [R0] ;
.L_x_1:
        /*0020*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*0030*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*0040*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/              @!P1 BRA `(.L_x_0) ;
        /*0070*/               @P2 BRA `(.L_x_2) ;
.L_x_2:
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_the_shortest_loop_with_most_products():
    assert machine_code(main_loop(TEXT)) == {"QMMA": 3, "BRA": 1}
    assert machine_code(TEXT)["BRA"] == 4


def test_a_kernel_without_such_a_loop():
    with pytest.raises(ValueError, match="no loop in the text has most of the products"):
        main_loop(TEXT.replace("@P0 BRA `(.L_x_1)", "NOP").replace("@!P1 BRA `(.L_x_0)", "NOP"))
    with pytest.raises(ValueError, match="no loop"):
        main_loop("        /*0000*/                   EXIT ;")
