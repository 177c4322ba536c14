"""Parameters declared once, and where they live on a mesh.

This package owns the declaration of a parameter (shape, dtype, logical axes, initialiser), everything that derives from
it (the abstract tree, the initial values, the names, the shardings), the mesh and what its devices exchange, and the
rules that map logical axes to mesh axes. It knows no model.
"""

from swerve.parallel.declared import (
    Initialiser,
    Parameter,
    ParameterTree,
    abstract,
    constant,
    flatten_names,
    initialise,
    log_uniform_step,
    normal,
    num_parameters,
    ones,
    scaled_normal,
    stack,
    unflatten_names,
    uniform,
    uniform_log,
    zeros,
)
from swerve.parallel.host import tune_cpu
from swerve.parallel.mesh import AXES, ONE_DEVICE, ROW_AXES, MeshShape, exchange_steps
from swerve.parallel.rules import ShardingRules, Split, shardings, specs

__all__ = [
    "AXES",
    "ONE_DEVICE",
    "ROW_AXES",
    "Initialiser",
    "MeshShape",
    "Parameter",
    "ParameterTree",
    "ShardingRules",
    "Split",
    "abstract",
    "constant",
    "exchange_steps",
    "flatten_names",
    "initialise",
    "log_uniform_step",
    "normal",
    "num_parameters",
    "ones",
    "scaled_normal",
    "shardings",
    "specs",
    "stack",
    "tune_cpu",
    "unflatten_names",
    "uniform",
    "uniform_log",
    "zeros",
]
