"""GPU kernels for rows of small networks. They need Triton: this package is imported on a GPU."""

from esper.population.kernels.convolution import Geometry, RowConvolution, RowDepthwise
from esper.population.kernels.norm import RowNorm
from esper.population.kernels.rows import BlendRows, TakeRows

__all__ = ["BlendRows", "Geometry", "RowConvolution", "RowDepthwise", "RowNorm", "TakeRows"]
