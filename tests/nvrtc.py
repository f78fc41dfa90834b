"""Tests that compile device code are skipped where the compiler isn't installed; they need no GPU."""

import pytest

from megakernel.cubin import compiler_version
from megakernel.errors import CompilerMissingError

try:
    compiler_version()
    _reason = ""
except CompilerMissingError as error:
    _reason = str(error)

needs_nvrtc = pytest.mark.skipif(bool(_reason), reason=_reason)
