"""Parameters declared once, and where they live on a mesh.

This package owns the declaration of a parameter (shape, dtype, logical axes, initialiser), everything that derives from
it (the abstract tree, the initial values, the names, the shardings), and the rules that map logical axes to mesh axes.
It knows no model.
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
from swerve.parallel.rules import ShardingRules, shardings

__all__ = [
    "Initialiser",
    "Parameter",
    "ParameterTree",
    "ShardingRules",
    "abstract",
    "constant",
    "flatten_names",
    "initialise",
    "log_uniform_step",
    "normal",
    "num_parameters",
    "ones",
    "scaled_normal",
    "shardings",
    "stack",
    "tune_cpu",
    "unflatten_names",
    "uniform",
    "uniform_log",
    "zeros",
]
