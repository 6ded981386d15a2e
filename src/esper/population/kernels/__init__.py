"""GPU kernels for rows of small networks. They need Triton: this package is imported on a GPU."""

from esper.population.kernels.attention import RowAttention, attention_fits
from esper.population.kernels.blends import JoinParts
from esper.population.kernels.convolution import Geometry, RowConvolution
from esper.population.kernels.depthwise import RowDepthwise
from esper.population.kernels.norm import ACTIVATIONS, RowNorm
from esper.population.kernels.optimizer import learn_rows
from esper.population.kernels.perceptron import RowPerceptron, perceptron_fits
from esper.population.kernels.rows import BlendRows, TakeRows, pick_rows

__all__ = [
    "ACTIVATIONS",
    "BlendRows",
    "Geometry",
    "JoinParts",
    "RowAttention",
    "RowConvolution",
    "RowDepthwise",
    "RowNorm",
    "RowPerceptron",
    "TakeRows",
    "attention_fits",
    "learn_rows",
    "perceptron_fits",
    "pick_rows",
]
