"""The Qwen3.5-MoE hybrid text model: configuration, parameters, training forward pass, decoding, log-probs, files.

This package owns what the policy computes, from token ids to log-probabilities, exactly as the published implementation
does, with packed sequences that never see each other. Trainer and engine share it; it knows neither.
"""

from swerve.models.config import PUBLISHED, TINY, Qwen35MoeConfig
from swerve.models.decode import DecodeState, extend, grow_state, init_state, reset_rows
from swerve.models.execution import REMAT_NAMES, Execution, Remat
from swerve.models.forward import ForwardOutput, forward
from swerve.models.head import head_weight, logits, token_logprobs
from swerve.models.hf import load_hf, save_hf
from swerve.models.parameters import cast, initialise, num_active_parameters, parameters, stack_blocks, unstack_blocks
from swerve.models.plain_head import HeadLayout, plain_token_logprobs
from swerve.models.probe import score_tokens
from swerve.models.sharded_head import sharded_token_logprobs
from swerve.models.sharding import check_mesh, parameter_shardings, parameter_specs

__all__ = [
    "PUBLISHED",
    "REMAT_NAMES",
    "TINY",
    "DecodeState",
    "Execution",
    "ForwardOutput",
    "HeadLayout",
    "Qwen35MoeConfig",
    "Remat",
    "cast",
    "check_mesh",
    "extend",
    "forward",
    "grow_state",
    "head_weight",
    "init_state",
    "initialise",
    "load_hf",
    "logits",
    "num_active_parameters",
    "parameter_shardings",
    "parameter_specs",
    "parameters",
    "plain_token_logprobs",
    "reset_rows",
    "save_hf",
    "score_tokens",
    "sharded_token_logprobs",
    "stack_blocks",
    "token_logprobs",
    "unstack_blocks",
]
