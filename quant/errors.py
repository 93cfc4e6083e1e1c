"""What quantization refuses. Callers turn these into errors of their own tree.

ValueError
└── QuantError
    ├── SchemeError   a scheme that cannot be, or that a matrix's size does not allow
    └── FormatError   tensors that do not fit together, or weights that a file format cannot hold
"""

from __future__ import annotations


class QuantError(ValueError):
    """Any refusal of the quant library."""


class SchemeError(QuantError):
    """A scheme that cannot be, or that a matrix's size does not allow."""


class FormatError(QuantError):
    """Tensors that do not fit together, or weights that a file format cannot hold."""
