"""Triton kernels for rows of small networks. They need Triton: this package is imported on a GPU alone."""

from esper.population.kernels.attention import RowAttention as RowAttention
from esper.population.kernels.attention import attention_fits as attention_fits
from esper.population.kernels.blend import RowBlend as RowBlend
from esper.population.kernels.convolution import Geometry as Geometry
from esper.population.kernels.convolution import RowConvolution as RowConvolution
from esper.population.kernels.filters import RowFilters as RowFilters
from esper.population.kernels.gelu import RowGelu as RowGelu
from esper.population.kernels.norm import RowNorm as RowNorm
from esper.population.kernels.optimizer import learn_rows as learn_rows
from esper.population.kernels.rows import gather_rows as gather_rows
