"""GPU kernels for rows of small networks. They need Triton: this package is imported on a GPU."""

from esper.population.kernels.attention import RowAttention, attention_fits
from esper.population.kernels.convolution import Geometry, RowConvolution, RowDepthwise
from esper.population.kernels.norm import ACTIVATIONS, RowNorm
from esper.population.kernels.optimizer import learn_rows
from esper.population.kernels.perceptron import RowPerceptron, perceptron_fits
from esper.population.kernels.rows import AddToRows, BlendParts, TakeRows, gather_rows

__all__ = [
    "ACTIVATIONS",
    "AddToRows",
    "BlendParts",
    "Geometry",
    "RowAttention",
    "RowConvolution",
    "RowDepthwise",
    "RowNorm",
    "RowPerceptron",
    "TakeRows",
    "attention_fits",
    "gather_rows",
    "learn_rows",
    "perceptron_fits",
]
