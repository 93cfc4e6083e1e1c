"""What quantization refuses. Callers turn these into errors of their own tree.

ValueError
└── QuantError
    ├── SchemeError   a scheme that cannot be, or that a matrix's size does not allow
    ├── FormatError   tensors that do not fit together, or weights that a file format cannot hold
    └── NotFinite     weights or their inputs that hold NaN or infinity
"""

from __future__ import annotations


class QuantError(ValueError):
    """Any refusal of the quant library."""


class SchemeError(QuantError):
    """A scheme that cannot be, or that a matrix's size does not allow."""


class FormatError(QuantError):
    """Tensors that do not fit together, or weights that a file format cannot hold."""


class NotFinite(QuantError):
    """Weights or their inputs hold NaN or infinity."""
