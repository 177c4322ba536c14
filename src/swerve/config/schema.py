"""Every setting of a recipe, in plain frozen dataclasses.

The names, types and docstrings here are the single source of the recipe files, the command line and its help: a
field `temperature` of the section `rollout` is `temperature = 1.0` under `[rollout]` in the file and
`--rollout.temperature 1.0` on the command line. There is no `None`, since TOML has none: a limit that does not bind is
`inf`, and a count of 0 says what it means. `contradictions` yields `(key, what is wrong and what to do)`.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from string import Formatter
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from swerve.config.constraints import (
    Count,
    CountOrZero,
    NonNegativeFloat,
    PositiveFloat,
    PositiveShare,
    Range,
    Seconds,
    Share,
)
from swerve.config.laws import (
    CONTEXT_LENGTH,
    GENERATIONS_PER_PROMPT,
    NUM_EVALUATION_TASKS,
    TARGET_ACCURACY,
    first_evaluation_step,
    learning_rate,
    max_grad_norm,
)

Contradictions = Iterator[tuple[str, str]]


def _without_effect(section: object, read: bool, why: str, *keys: str) -> Contradictions:
    """Complaints about settings of a section that were changed although nothing reads them."""
    defaults = type(section)()
    for key in keys:
        if not read and getattr(section, key) != getattr(defaults, key):
            yield key, f"has no effect with {why}: remove it"


def _command_faults(command: str, placeholders: Sequence[str]) -> Contradictions:
    """Complaints about the setting `command`, a command line with placeholders in braces."""
    try:
        words = shlex.split(command)
        names = [name for word in words for _, name, _, _ in Formatter().parse(word) if name is not None]
    except ValueError as error:
        yield "command", f"cannot be split into words and placeholders: {error}"
        return
    if not words:
        yield "command", "names no program: remove it, or name one"
    for name in names:
        if name not in placeholders:
            known = ", ".join(f"{{{one}}}" for one in placeholders)
            yield "command", f"has the unknown placeholder {{{name}}}: there are {known}; write {{{{ for a brace"


# ------------------------------------------------------------------------------------------------- every recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Identity of a run.

    Attributes:
        name: Name of the run's directory; empty takes the recipe's file name and the time of the start.
        directory: Folder in which the run's directory is made.
        seed: Everything drawn at random in the run derives from it.
    """

    name: str = ""
    directory: str = "runs"
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """What a run shows and keeps.

    Attributes:
        progress: How progress is shown: `auto` is `rich` on a terminal and `plain` lines elsewhere.
        tensorboard: Write TensorBoard event files beside the metrics.
        trajectories: Keep every trajectory, tokens and texts, as JSON lines.
        durable: Force every metric line to the disk before the next step starts, so that it survives a power
            cut; a killed process loses none either way.
    """

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    tensorboard: bool = True
    trajectories: bool = True
    durable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When state is saved.

    Attributes:
        every: Optimizer steps between checkpoints; 0 saves only the last one.
        keep: Most recent checkpoints kept; 0 keeps all.
        keep_best: Checkpoints kept besides, those of the highest `best_by`.
        best_by: What makes a checkpoint good: the mean `reward` of the episodes of its step, or `pass_at_1` of the
            evaluation after it.
        full: Save the optimizer's state too, so that the run can be resumed from it; otherwise only weights, whose
            moment is on record: nothing is staged before the update that such a checkpoint holds.
    """

    every: CountOrZero = 1
    keep: CountOrZero = 2
    keep_best: CountOrZero = 0
    best_by: Literal["reward", "pass_at_1"] = "reward"
    full: bool = True

    def contradictions(self) -> Contradictions:
        """The best are chosen where some are deleted."""
        yield from _without_effect(self, self.keep > 0, "keep = 0, which keeps all", "keep_best")
        yield from _without_effect(self, self.keep_best > 0, "keep_best = 0", "best_by")


# ------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The language model that is trained.

    Attributes:
        checkpoint: Directory with Hugging Face files (config, safetensors, tokenizer), or `tiny` for the
            policy that ships with Swerve.
        model: Shape of the model, so that a run can be planned without its weights: that of a published one, or
            whatever the checkpoint has.
        random_weights: Keep the checkpoint's architecture and tokenizer, and draw the weights anew.
        freeze_router: Do not train the experts' router.
    """

    checkpoint: str = "tiny"
    model: Literal["checkpoint", "qwen35_397b_a17b", "qwen35_35b_a3b"] = "checkpoint"
    random_weights: bool = False
    freeze_router: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """The repairs to train and to evaluate on.

    Attributes:
        family: Shipped task family, or `files` for the two files named here.
        train_file: Task file (JSON lines) to train on; only with family `files`.
        validation_file: Held-out task file; only with family `files`.
        num_train: Training tasks used, from the start of the file; 0 uses all.
        order: `fixed` takes training tasks in file order, round and round; `shuffled` draws a new order each round.
    """

    family: Literal["functions", "mini", "files"] = "functions"
    train_file: str = ""
    validation_file: str = ""
    num_train: CountOrZero = 0
    order: Literal["fixed", "shuffled"] = "fixed"

    def contradictions(self) -> Contradictions:
        """Files are named exactly where they are used."""
        for key in ("train_file", "validation_file"):
            named = getattr(self, key) != ""
            if self.family == "files" and not named:
                yield key, 'is missing: family = "files" needs it'
            if self.family != "files" and named:
                yield key, f'has no effect with family = "{self.family}": remove it, or set family = "files"'


AGENT_PLACEHOLDERS = ("task_file", "base_url", "model", "docker")
"""What may stand in braces in the command of an outside agent."""
TEMPLATE_STYLES = {"tiny_repair": "plain", "codeact": "numbered"}
"""What tools say to the policies that the templates are for; `plain` with a template of the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """How one episode runs.

    Attributes:
        template: Name of the prompt template, `tiny_repair` (of the policy that ships) or `codeact` (for full-size
            models in whole repositories), or the path of a template file.
        observations: What tools say: `plain` is bare text, `numbered` adds line numbers, surroundings and exit codes;
            `template` is what belongs to the template: `numbered` with codeact, `plain` otherwise.
        max_observation_characters: Longer observations are cut; 0 is as many as the context has tokens.
        command: Command line of a program that plays in place of the built-in agent; empty for none. `{task_file}`,
            `{base_url}`, `{model}` and `{docker}` stand for those of an episode.
        max_turns: Assistant turns of one episode at most.
        episode_timeout_s: Seconds from the first prompt to the last observation.
        command_timeout_s: Seconds of one command that the agent runs.
        test_timeout_s: Seconds of the hidden evaluation.
    """

    template: str = "tiny_repair"
    observations: Literal["template", "plain", "numbered"] = "template"
    max_observation_characters: CountOrZero = 0
    command: str = ""
    max_turns: Count = 5
    episode_timeout_s: Seconds = 120.0
    command_timeout_s: Seconds = 10.0
    test_timeout_s: Seconds = 10.0

    def contradictions(self) -> Contradictions:
        """Observations are those the template's policies know, and a program's command line can be filled in."""
        known = TEMPLATE_STYLES.get(self.template, self.observations)
        if self.observations not in ("template", known):
            yield "observations", f'must be "template" or "{known}" with template = "{self.template}": it is for these'
        why = "an outside agent, whose tools are its own"
        yield from _without_effect(self, not self.command, why, "observations", "max_observation_characters")
        if self.command:
            yield from _command_faults(self.command, AGENT_PLACEHOLDERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """Where an episode's commands run, and what they may use.

    Attributes:
        backend: What isolates an episode. docker takes Podman, too; unsafe-local isolates nothing.
        images: Where root file systems come from: a folder of SIF files or roots, or for docker a prefix of names.
        memory_mib: Memory of one sandbox, in MiB.
        num_processes: Processes and threads of one sandbox; unsafe-local does not limit them.
        disk_mib: What one sandbox may write, in MiB.
        cpus: Cores of one sandbox, with docker.
        cpu_s: Processor seconds of one process in a sandbox.
        output_kib: Output of one command that is kept, in KiB.
    """

    backend: Literal["bubblewrap", "apptainer", "docker", "unsafe-local"] = "bubblewrap"
    images: str = ""
    memory_mib: Annotated[int, Range(16)] = 512
    num_processes: Annotated[int, Range(4)] = 64
    disk_mib: Count = 64
    cpus: PositiveFloat = 1.0
    cpu_s: Count = 20
    output_kib: Count = 64

    def contradictions(self) -> Contradictions:
        """Images are named where the backend has none of its own, and only where it can use them."""
        if self.backend in ("apptainer", "docker") and not self.images:
            yield "images", f'is missing: backend = "{self.backend}" needs it'
        backend = f'backend = "{self.backend}"'
        yield from _without_effect(self, self.backend != "unsafe-local", backend, "images", "num_processes")
        yield from _without_effect(self, self.backend == "docker", backend, "cpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """How a step's episodes are collected.

    Attributes:
        prompts_per_step: Tasks of one optimizer step.
        generations_per_prompt: Episodes per task; they form one group.
        temperature: Logits are divided by it.
        top_p: Smallest set of most likely tokens whose probability reaches it.
        max_new_tokens: Tokens of one turn at most.
        context_length: Tokens of one episode at most, prompt and observations included.
        num_slots: Episodes decoded side by side; fewer than a step's episodes means several rounds.
        retries: Times an episode that fails through no fault of the policy is tried again.
    """

    prompts_per_step: Count = 16
    generations_per_prompt: Count = 8
    temperature: PositiveFloat = 1.0
    top_p: PositiveShare = 1.0
    max_new_tokens: Count = 64
    context_length: Count = 512
    num_slots: Count = 64
    retries: CountOrZero = 2

    @property
    def global_batch_size(self) -> int:
        """Episodes of one optimizer step."""
        return self.prompts_per_step * self.generations_per_prompt

    def contradictions(self) -> Contradictions:
        """Lengths nest, and training samples come from the whole distribution."""
        if self.max_new_tokens >= self.context_length:
            yield "max_new_tokens", f"leaves no room for a prompt in context_length = {self.context_length}: lower it"
        if self.top_p < 1.0:
            yield "top_p", "must be 1.0: a cut distribution biases the importance ratios of training"


ENGINE_PLACEHOLDERS = ("weights", "host", "port")
"""What may stand in braces in the command of an engine's servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What samples from the policy.

    Attributes:
        kind: `embedded` samples in this process; `vllm` asks servers of vLLM over HTTP.
        urls: Of the servers, as `http://host:port`; episodes are spread over them, and each keeps to one.
        model: Name by which they serve the policy; empty asks them.
        command: Command line that starts the server of a URL on this machine; empty where they run already.
            `{weights}`, `{host}` and `{port}` stand for the policy's files and for what the URL says.
        refit: How new weights reach the servers: `reload` has them read files as they run, `restart` ends them and
            starts them on the files.
        weights_directory: Folder for these files, which servers on other machines see by the same path.
        request_timeout_s: Seconds without a word from a server after which it counts as dead.
        load_timeout_s: Seconds that a server may take to start, or to read weights.
        probe_tolerance: Largest difference between engine and trainer, in nats, of a log-probability of the fixed
            tokens that both score whenever the engine has taken weights; types narrower than float32 need more.
    """

    kind: Literal["embedded", "vllm"] = "embedded"
    urls: tuple[str, ...] = ()
    model: str = ""
    command: str = ""
    refit: Literal["reload", "restart"] = "reload"
    weights_directory: str = ""
    request_timeout_s: Seconds = 120.0
    load_timeout_s: Seconds = 600.0
    probe_tolerance: PositiveFloat = 1e-3

    def contradictions(self) -> Contradictions:
        """Servers are named exactly where there are some, and can be started where they are to be."""
        if self.kind == "embedded":
            keys = [field.name for field in fields(self) if field.name not in ("kind", "probe_tolerance")]
            yield from _without_effect(self, False, 'kind = "embedded"', *keys)
            return
        for key in ("urls", "weights_directory"):
            if not getattr(self, key):
                yield key, f'is missing: kind = "{self.kind}" needs it'
        for url in self.urls:
            if not _names_a_server(url):
                yield "urls", f'has "{url}": write each as "http://host:port"'
        if len(set(self.urls)) < len(self.urls):
            yield "urls", "names a server twice: remove one"
        if self.refit == "restart" and not self.command:
            yield "command", 'is missing: refit = "restart" needs it'
        if self.command:
            yield from _command_faults(self.command, ENGINE_PLACEHOLDERS)
            for name in ("weights", "port"):
                if f"{{{name}}}" not in self.command:
                    yield "command", f"lacks {{{name}}}: a server is told it"
            if any(url.startswith("https:") for url in self.urls):
                yield "urls", 'must be "http://host:port" with command: servers started here speak no TLS'


def _names_a_server(url: str) -> bool:
    """Whether a URL is a scheme, a host and a port, and nothing else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    rest = (parts.path, parts.query, parts.fragment, parts.username)
    return parts.scheme in ("http", "https") and bool(parts.hostname and port) and not any(rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """How rewards become a loss.

    Attributes:
        advantage: Baseline and scale of a group's rewards: `leave_one_out` (mean and deviation of the
            others), `rloo` (mean of the others, unscaled), `group_std` (the whole group's), `group_mean`
            (unscaled).
        loss: `forced_on_policy` weighs each token by trainer/sampler probability and lets only the advantage
            steer it; `clip`, `dual_clip`, `no_clip`, `cispo`, `gspo` are the published surrogates.
        clip_low: Clipping below 1, where the loss clips.
        clip_high: Clipping above 1, where the loss clips.
        dual_clip: Bound of the ratio for negative advantages, with the loss `dual_clip`.
        importance: What corrects for the difference of trainer and sampler: `sequence_mask` drops sequences
            whose mean ratio is outside the gate and weighs the rest by token (only `forced_on_policy` does; the
            surrogates carry the ratio themselves), `token` caps each token's weight at `importance_cap`, `none` does
            nothing.
        sequence_gate_low: A sequence below it is dropped, with `sequence_mask`.
        sequence_gate_high: A sequence above it is dropped, with `sequence_mask`.
        importance_cap: Largest weight of a token, with `token`.
        normaliser: What the sum over tokens is divided by: `token` (all trained tokens of the step),
            `sequence` (mean over sequences of their token means), `constant` (sequences times context
            length).
        overlong_filter: Leave out sequences that fill the whole context.
        skip_zero_advantage: Do not compute sequences whose advantage is 0, as all have of a task always or never
            solved. The gradient stays what it is: they still count in what it is divided by, as sequences that pass
            every check of log-probabilities. Means over tokens are then over the others.
        logprob_error_threshold: Leave out sequences whose mean probability ratio of trainer and sampler,
            whichever way is larger, exceeds it; `inf` keeps all.
        kl_coefficient: Weight of the divergence from the starting policy; 0 adds none.
        kl_estimator: Which estimator of that divergence.
        max_logprob_gap: Largest mean difference of the sampler's and the trainer's log-probabilities before
            the first update; above it the run stops.
    """

    advantage: Literal["leave_one_out", "rloo", "group_std", "group_mean"] = "leave_one_out"
    loss: Literal["forced_on_policy", "clip", "dual_clip", "no_clip", "cispo", "gspo"] = "forced_on_policy"
    clip_low: Share = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Range(1, above_low=True)] = 3.0
    importance: Literal["sequence_mask", "token", "none"] = "sequence_mask"
    sequence_gate_low: Share = 0.999
    sequence_gate_high: Annotated[float, Range(1)] = 1.002
    importance_cap: PositiveFloat = 2.0
    normaliser: Literal["token", "sequence", "constant"] = "token"
    overlong_filter: bool = True
    skip_zero_advantage: bool = False
    logprob_error_threshold: Annotated[float, Range(1)] = 2.0
    kl_coefficient: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    max_logprob_gap: PositiveFloat = 1e-3

    def contradictions(self) -> Contradictions:
        """No ratio is applied twice, and nothing is set that its loss does not read."""
        if self.importance == "token" and self.loss != "forced_on_policy":
            yield (
                "importance",
                f'would apply the trainer/sampler ratio twice with loss = "{self.loss}", which carries it: '
                'write "none", or "sequence_mask" for its gate alone',
            )
        if self.loss == "gspo" and self.normaliser == "token":
            yield "normaliser", 'must be "sequence" with loss = "gspo", whose ratio is one per sequence'
        clips = self.loss in ("clip", "dual_clip", "cispo", "gspo")
        gates = self.importance == "sequence_mask"
        yield from _without_effect(self, clips, f'loss = "{self.loss}"', "clip_low", "clip_high")
        yield from _without_effect(self, self.loss == "dual_clip", f'loss = "{self.loss}"', "dual_clip")
        importance = f'importance = "{self.importance}"'
        yield from _without_effect(self, gates, importance, "sequence_gate_low", "sequence_gate_high")
        yield from _without_effect(self, self.importance == "token", importance, "importance_cap")
        yield from _without_effect(self, self.kl_coefficient > 0, "kl_coefficient = 0", "kl_estimator")
        if self.skip_zero_advantage and self.kl_coefficient > 0:
            yield (
                "skip_zero_advantage",
                f"would leave out sequences that kl_coefficient = {self.kl_coefficient} gives a gradient: set it to "
                "false, or kl_coefficient to 0",
            )
        if self.loss == "gspo" and gates:
            beyond = "lies beyond the sequence gate, which drops such sequences first: narrow it, or write "
            if 1 - self.clip_low < self.sequence_gate_low:
                yield "clip_low", beyond + 'importance = "none"'
            if 1 + self.clip_high > self.sequence_gate_high:
                yield "clip_high", beyond + 'importance = "none"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Adam, its state in f32, with the gradient clipped by its global norm.

    Attributes:
        learning_rate: Step size after warm-up; constant.
        warmup_steps: Steps over which the learning rate rises from 0; 0 starts at full size.
        beta1: Decay of the gradient's mean.
        beta2: Decay of the squared gradient's mean.
        eps: Added to the root in the denominator.
        weight_decay: Decoupled decay of the weights, per unit of learning rate.
        max_grad_norm: The gradient is scaled down to this global norm; `inf` never does.
    """

    learning_rate: PositiveFloat = 1e-4
    warmup_steps: CountOrZero = 0
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How trajectories are laid into rows.

    Attributes:
        row_length: Token slots of one row. Where a trajectory of a step is longer, the rows of that step are twice as
            long, or four times, and fewer are computed at once.
        rows_per_micro_batch: Rows computed at once; memory grows with it, results do not depend on it.
    """

    row_length: Count = 512
    rows_per_micro_batch: Count = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The trainer's devices, by what they split; on a CPU they are simulated.

    Attributes:
        fsdp: Parts of a micro-batch's rows whose devices share the parameters at rest.
        context: Parts of a row.
        expert: Parts of the experts, and of the rows.
        tensor: Parts of heads and inner units.
    """

    fsdp: Count = 1
    context: Count = 1
    expert: Count = 1
    tensor: Count = 1

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.fsdp * self.context * self.expert * self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How the trainer computes the model: what changes speed and memory, and results by rounding at most.

    Attributes:
        parameter_dtype: Type of the weights; decay rates and router stay float32, and so does Adam's state.
        activation_dtype: Type of the activations; norms, softmaxes, states and log-probabilities are float32.
        attention: `blocked` runs everywhere, `splash` on TPUs.
        attention_block: Queries computed at once; 0 chooses by the length of a row.
        context_attention: Where rows are split: `gather` all keys and values, or pass them round a `ring`.
        delta_chunk: Tokens of a Gated DeltaNet chunk; 0 chooses by the width of its keys.
        delta_precision: Of the products that compose states across the devices of a row.
        experts: `sorted` blocks run everywhere, `grouped` products on TPUs.
        expert_block: Tokens of one block of sorted tokens at most.
        expert_chunks: Parts in which a device's tokens visit the experts; more need less memory.
        buffer_factor: (token, expert) pairs that a device has room for, in multiples of its balanced load. A
            micro-batch that needs more is computed again without a limit; `dropless` sets none from the start.
        layers: `scan` compiles one layer of each kind, `unroll` all of them.
        head: `sharded` gathers the table once forward and once backward, and each device scores its own tokens; `plain`
            is its twin, which leaves gradient and exchanges to JAX: slow on a mesh, and there to compare with.
        logprob_chunk: Tokens whose logits are live at a time; of the plain head, columns of all rows.
        gradient_sum_dtype: Type in which gradients of parameters are added up over devices. `parameter`: their own,
            cast to float32 after the sum; with bfloat16 that sends half the bytes. `float32`: cast before the sum.
            It covers the sums of what devices hold alike, of what is gathered for a layer, and of the head's table;
            the latter two are rounded to the parameter's type once they are summed. A device's own sums, over tokens
            and micro-batches, and exchanges of activations are what they are in either case.
    """

    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["blocked", "splash"] = "blocked"
    attention_block: CountOrZero = 0
    context_attention: Literal["gather", "ring"] = "gather"
    delta_chunk: CountOrZero = 0
    delta_precision: Literal["default", "high", "highest"] = "highest"
    experts: Literal["sorted", "grouped"] = "sorted"
    expert_block: Count = 128
    expert_chunks: Count = 1
    buffer_factor: Annotated[float | Literal["dropless"], Range(0, above_low=True)] = "dropless"
    layers: Literal["scan", "unroll"] = "unroll"
    head: Literal["sharded", "plain"] = "sharded"
    logprob_chunk: Count = 1024
    gradient_sum_dtype: Literal["parameter", "float32"] = "parameter"

    def contradictions(self) -> Contradictions:
        """Nothing is set that the kernels and types chosen do not read."""
        if self.head == "plain" and self.gradient_sum_dtype != "parameter":
            yield "gradient_sum_dtype", 'cannot be chosen with head = "plain": JAX reduces its gradients; remove it'
        narrow = self.parameter_dtype == "bfloat16"
        yield from _without_effect(self, narrow, 'parameter_dtype = "float32"', "gradient_sum_dtype")
        yield from _without_effect(self, self.experts == "sorted", f'experts = "{self.experts}"', "expert_block")


Keeping = Literal["keep", "recompute", "offload"]
"""What becomes of an intermediate tensor until the backward pass; `offload` moves it to the host's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remat:
    """What a layer keeps for its backward pass: each tensor is kept, computed again, or moved to the host and back.

    Attributes:
        enabled: Choose; otherwise everything is kept, what has no name here included.
        layer_input: The residual stream before the layer.
        attention_query: Queries, normalised and rotated.
        attention_key: Keys, likewise.
        attention_value: Values of attention.
        attention_mixed: What attention gives, before its gate.
        delta_projected: Queries, keys and values of the DeltaNet before the convolution.
        delta_mixed: What the DeltaNet gives, before its norm.
        mixer_output: What either adds to the residual stream.
        expert_hidden: Inner units of the routed experts.
        expert_output: What the routed experts give.
        shared_hidden: Inner units of the shared expert.
    """

    enabled: bool = False
    layer_input: Keeping = "keep"
    attention_query: Keeping = "recompute"
    attention_key: Keeping = "recompute"
    attention_value: Keeping = "recompute"
    attention_mixed: Keeping = "recompute"
    delta_projected: Keeping = "recompute"
    delta_mixed: Keeping = "recompute"
    mixer_output: Keeping = "recompute"
    expert_hidden: Keeping = "recompute"
    expert_output: Keeping = "recompute"
    shared_hidden: Keeping = "recompute"

    def contradictions(self) -> Contradictions:
        """Nothing is chosen where nothing is computed again."""
        keys = [field.name for field in fields(self) if field.name != "enabled"]
        yield from _without_effect(self, self.enabled, "enabled = false", *keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How long a run trains.

    Attributes:
        num_steps: Optimizer steps.
        time_limit_s: Seconds after which no new step starts; `inf` sets none.
        max_trajectory_age: Optimizer steps by which a trajectory's oldest token may lag behind the weights it trains.
            With 1, the next step's episodes are played while this step trains.
        pipelined: Pack the next step's first micro-batch while this step's last one computes.
        staged: Copy it to the devices too, before this step's update; not where this step's checkpoint is timed.
    """

    num_steps: Count = 30
    time_limit_s: Seconds = float("inf")
    max_trajectory_age: CountOrZero = 0
    pipelined: bool = False
    staged: bool = False

    def contradictions(self) -> Contradictions:
        """What is done ahead of time has something to be done with."""
        if self.staged and not self.pipelined:
            yield "staged", "needs pipelined = true: a micro-batch is packed before it is copied"
        if self.max_trajectory_age > 1:
            yield "max_trajectory_age", "must be 0 or 1: at most one step is played ahead"
        if self.pipelined and not self.max_trajectory_age:
            yield (
                "pipelined",
                "needs max_trajectory_age = 1: without it the next step's episodes are played after this step's update",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How the policy is measured on held-out tasks.

    Attributes:
        num_tasks: Held-out tasks used, from the start of the file; 0 uses all.
        attempts: Episodes per task; pass@k is reported for k up to it.
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_p: Smallest set of most likely tokens whose probability reaches it.
        before: Evaluate the starting policy.
        after: Evaluate the trained policy.
        every: Optimizer steps between evaluations on the way; 0 for none.
    """

    num_tasks: CountOrZero = 0
    attempts: Count = 4
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    before: bool = True
    after: bool = True
    every: CountOrZero = 0

    def contradictions(self) -> Contradictions:
        """The most likely token is drawn from no set."""
        yield from _without_effect(self, self.temperature > 0, "temperature = 0", "top_p")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlperf:
    """A scored run of MLPerf Training v6.1 `qwen35_397b_grpo`: it logs by the rules, and is evaluated afterwards.

    Attributes:
        enabled: Log, and save weights after every step from the first evaluation on.
        org: Who submits; a recipe may leave it open, a run may not.
        platform: On what, in the submitter's own words; likewise.
        division: `closed` keeps to the benchmark's settings, `open` may differ and says so.
        status: Availability of the platform.
        log: The MLPerf log; empty is `mlperf.log` in the run's directory.
        first_evaluation_step: First step whose weights are evaluated; 0 follows from the global batch size by law.
        target_accuracy: pass@4 on the held-out tasks that an evaluation has to reach.
        clear_cache: Have the kernel drop its caches first, which takes root; the log says whether it did.
    """

    enabled: bool = False
    org: str = ""
    platform: str = ""
    division: Literal["closed", "open"] = "closed"
    status: Literal["onprem", "cloud", "research", "preview"] = "onprem"
    log: str = ""
    first_evaluation_step: CountOrZero = 0
    target_accuracy: PositiveShare = TARGET_ACCURACY
    clear_cache: bool = True

    def contradictions(self) -> Contradictions:
        """A run that is not scored has nothing to say."""
        keys = [field.name for field in fields(self) if field.name != "enabled"]
        yield from _without_effect(self, self.enabled, "enabled = false", *keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe:
    """Reinforcement learning of one policy on one set of tasks.

    Attributes:
        kind: `train`.
        run: Identity of the run.
        policy: The language model that is trained.
        tasks: The repairs to train and to evaluate on.
        agent: How one episode runs.
        sandbox: Where an episode's commands run.
        rollout: How a step's episodes are collected.
        engine: What samples from the policy.
        algorithm: How rewards become a loss.
        optimizer: How the loss becomes an update.
        packing: How trajectories are laid into rows.
        mesh: The trainer's devices.
        execution: How the trainer computes the model.
        remat: What a layer keeps for its backward pass.
        training: How long the run trains.
        evaluation: How the policy is measured.
        checkpoint: When state is saved.
        telemetry: What the run shows and keeps.
        mlperf: Whether it is a scored run.
    """

    KIND: ClassVar[str] = "train"

    kind: Literal["train"] = "train"
    run: Run = field(default_factory=Run)
    policy: Policy = field(default_factory=Policy)
    tasks: Tasks = field(default_factory=Tasks)
    agent: Agent = field(default_factory=Agent)
    sandbox: Sandbox = field(default_factory=Sandbox)
    rollout: Rollout = field(default_factory=Rollout)
    engine: Engine = field(default_factory=Engine)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    packing: Packing = field(default_factory=Packing)
    mesh: Mesh = field(default_factory=Mesh)
    execution: Execution = field(default_factory=Execution)
    remat: Remat = field(default_factory=Remat)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    telemetry: Telemetry = field(default_factory=Telemetry)
    mlperf: Mlperf = field(default_factory=Mlperf)

    def left_open(self) -> Contradictions:
        """What a recipe may leave open, and a run may not: a scored one says whose it is."""
        for key in ("org", "platform"):
            if self.mlperf.enabled and not getattr(self.mlperf, key).strip():
                yield f"mlperf.{key}", "is missing: a scored run names it"

    @property
    def first_evaluation_step(self) -> int:
        """First step of a scored run whose weights are evaluated."""
        return self.mlperf.first_evaluation_step or first_evaluation_step(self.rollout.global_batch_size)

    def contradictions(self) -> Contradictions:
        """What no single section can see."""
        least = {"leave_one_out": 3, "group_std": 2, "rloo": 2, "group_mean": 2}[self.algorithm.advantage]
        if self.rollout.generations_per_prompt < least:
            yield (
                "rollout.generations_per_prompt",
                f'must be at least {least} with algorithm.advantage = "{self.algorithm.advantage}": '
                "a smaller group has no baseline to compare with",
            )
        yield from self._uneven_mesh()
        if self.mlperf.enabled:
            yield from self._unscorable()
        if self.checkpoint.best_by == "pass_at_1" and not self.evaluation.every:
            yield "checkpoint.best_by", "needs evaluation.every above 0: no checkpoint on the way is evaluated"
        granted = max(self.agent.command_timeout_s, self.agent.test_timeout_s)
        if self.sandbox.cpu_s < granted:
            yield (
                "sandbox.cpu_s",
                f"would cut the {granted:g} s that agent.command_timeout_s and agent.test_timeout_s grant: raise it",
            )
        if self.tasks.num_train and self.rollout.prompts_per_step > self.tasks.num_train:
            yield (
                "rollout.prompts_per_step",
                f"must be at most tasks.num_train = {self.tasks.num_train}: no task is asked twice in one step",
            )

    def _unscorable(self) -> Contradictions:
        """Nothing but training happens between a scored run's start and its end, and every checkpoint is there."""
        why = "in a scored run, whose checkpoints are evaluated afterwards"
        for key in ("before", "after", "every"):
            if getattr(self.evaluation, key):
                yield f"evaluation.{key}", f"must be {'0' if key == 'every' else 'false'} {why}"
        for key, value, shown in (("full", False, "false"), ("every", 1, "1"), ("keep", 0, "0")):
            if getattr(self.checkpoint, key) != value:
                yield f"checkpoint.{key}", f"must be {shown} {why}"
        if self.first_evaluation_step > self.training.num_steps:
            yield "training.num_steps", f"must be at least the first evaluation step, {self.first_evaluation_step}"
        if self.tasks.order != "fixed":
            yield "tasks.order", 'must be "fixed": training tasks of the benchmark are never shuffled'
        if self.rollout.context_length != CONTEXT_LENGTH:
            yield "rollout.context_length", f"must be {CONTEXT_LENGTH}, in both divisions"
        if self.evaluation.num_tasks != NUM_EVALUATION_TASKS:
            yield "evaluation.num_tasks", f"must be {NUM_EVALUATION_TASKS}, in both divisions"
        if self.mlperf.division == "closed":
            yield from self._not_closed()

    def _not_closed(self) -> Contradictions:
        """Settings by which a run of the closed division differs from the benchmark's."""
        batch, rollout, optimizer = self.rollout.global_batch_size, self.rollout, self.optimizer
        for key, value, wanted, tolerance in (
            ("rollout.generations_per_prompt", rollout.generations_per_prompt, GENERATIONS_PER_PROMPT, 0),
            ("rollout.temperature", rollout.temperature, 1.0, 0),
            ("rollout.top_p", rollout.top_p, 1.0, 0),
            ("evaluation.temperature", self.evaluation.temperature, 0.1, 0),
            ("evaluation.top_p", self.evaluation.top_p, 0.95, 0),
            ("evaluation.attempts", self.evaluation.attempts, 4, 0),
            ("optimizer.learning_rate", optimizer.learning_rate, learning_rate(batch), 1e-9),
            ("optimizer.max_grad_norm", optimizer.max_grad_norm, max_grad_norm(batch), 1e-9),
            ("optimizer.warmup_steps", optimizer.warmup_steps, 0, 0),
            ("optimizer.beta1", optimizer.beta1, 0.9, 0),
            ("optimizer.beta2", optimizer.beta2, 0.999, 0),
            ("optimizer.eps", optimizer.eps, 1e-8, 0),
            ("optimizer.weight_decay", optimizer.weight_decay, 0.0, 0),
            ("agent.max_turns", self.agent.max_turns, 30, 0),
            ("agent.episode_timeout_s", self.agent.episode_timeout_s, 1800.0, 0),
            ("agent.command_timeout_s", self.agent.command_timeout_s, 60.0, 0),
            ("agent.test_timeout_s", self.agent.test_timeout_s, 60.0, 0),
            ("mlperf.target_accuracy", self.mlperf.target_accuracy, TARGET_ACCURACY, 0),
            ("mlperf.first_evaluation_step", self.first_evaluation_step, first_evaluation_step(batch), 0),
        ):
            if not abs(value - wanted) <= tolerance:
                yield key, f"must be {wanted:.11g} in the closed division at a global batch size of {batch}"
        # The algorithm's defaults are the benchmark's; the gap before the first update is a guard of ours.
        benchmark = replace(Algorithm(), max_logprob_gap=self.algorithm.max_logprob_gap)
        for key in (one.name for one in fields(Algorithm)):
            wanted = getattr(benchmark, key)
            if getattr(self.algorithm, key) != wanted:
                shown = str(wanted).lower() if isinstance(wanted, bool) else wanted
                yield f"algorithm.{key}", f"must be {shown} in the closed division"
        if not self.policy.freeze_router:
            yield "policy.freeze_router", "must be true in the closed division"

    def _uneven_mesh(self) -> Contradictions:
        """A micro-batch divides over the mesh, and nothing is set that one device does not do."""
        mesh, packing = self.mesh, self.packing
        if packing.rows_per_micro_batch % (mesh.fsdp * mesh.expert):
            yield (
                "packing.rows_per_micro_batch",
                f"must be a multiple of mesh.fsdp x mesh.expert = {mesh.fsdp * mesh.expert}: they split the rows",
            )
        if packing.row_length % mesh.context:
            yield "packing.row_length", f"must be a multiple of mesh.context = {mesh.context}: it splits the rows"
        elif (
            self.execution.attention == "splash" and packing.row_length // mesh.context % self.execution.attention_block
        ):
            yield (
                "execution.attention_block",
                f"must divide packing.row_length / mesh.context = {packing.row_length // mesh.context} with "
                'attention = "splash"',
            )
        if mesh.num_devices == 1 and self.execution.gradient_sum_dtype != "parameter":
            yield "execution.gradient_sum_dtype", "has no effect on one device: remove it"
        if mesh.context == 1:
            for key in ("context_attention", "delta_precision"):
                if getattr(self.execution, key) != getattr(Execution(), key):
                    yield f"execution.{key}", "has no effect with mesh.context = 1: remove it"


# --------------------------------------------------------------------------------------------------- pretraining


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Shape of a Qwen3.5 hybrid mixture-of-experts model, in the field names of its published configuration.

    The size of the vocabulary is the tokenizer's.

    Attributes:
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers; every `full_attention_interval`-th is gated attention, the others Gated DeltaNet.
        full_attention_interval: Layers of one repeating block.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Width of an attention head.
        partial_rotary_factor: Part of a head's width that carries the position.
        rope_theta: Base of the rotary frequencies.
        linear_num_key_heads: Query and key heads of Gated DeltaNet.
        linear_num_value_heads: Value heads of Gated DeltaNet.
        linear_key_head_dim: Width of a query or key head.
        linear_value_head_dim: Width of a value head.
        linear_conv_kernel_dim: Width of the causal convolution.
        num_experts: Routed experts of a layer.
        num_experts_per_tok: Experts that see a token.
        moe_intermediate_size: Width of a routed expert.
        shared_expert_intermediate_size: Width of the expert that sees every token.
        rms_norm_eps: Added to the mean square in a norm.
        tie_word_embeddings: Use the embedding as the output head.
        initializer_range: Standard deviation with which the embedding and the head start.
        max_position_embeddings: Longest context the weights are made for; recorded, not enforced.
    """

    hidden_size: Count = 128
    num_hidden_layers: Count = 8
    full_attention_interval: Count = 4
    num_attention_heads: Count = 4
    num_key_value_heads: Count = 2
    head_dim: Count = 32
    partial_rotary_factor: PositiveShare = 0.5
    rope_theta: PositiveFloat = 10_000.0
    linear_num_key_heads: Count = 2
    linear_num_value_heads: Count = 4
    linear_key_head_dim: Count = 32
    linear_value_head_dim: Count = 32
    linear_conv_kernel_dim: Count = 4
    num_experts: Count = 16
    num_experts_per_tok: Count = 2
    moe_intermediate_size: Count = 64
    shared_expert_intermediate_size: Count = 64
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02
    max_position_embeddings: Count = 4096

    def contradictions(self) -> Contradictions:
        """Heads and layers divide evenly."""
        for key, divisor in (
            ("num_hidden_layers", "full_attention_interval"),
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, key) % getattr(self, divisor):
                yield key, f"must be a multiple of {divisor} = {getattr(self, divisor)}"
        if self.num_experts_per_tok > self.num_experts:
            yield "num_experts_per_tok", f"must be at most num_experts = {self.num_experts}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainData:
    """What the policy imitates: demonstrations of repairs, drawn anew from their sources as training goes.

    Attributes:
        tokenizer: Directory with `tokenizer.json`, or `tiny` for the one that ships with Swerve.
        template: Name of the prompt template, or the path of a template file.
        families: Shipped task families whose training tasks are demonstrated, and whose held-out ones are kept out.
        context_length: Tokens of one demonstration at most; longer ones are passed over.
        mini_share: Part made of freshly generated functions.
        task_share: Part made of functions of training tasks, broken anew; the rest comes from the corpus.
        short_first: Demonstrations over which the longest function allowed grows to the full length.
        files_first: Demonstrations over which the probability of writing the whole file anew falls from 1 to 0.
        lines_first: Likewise for replacing whole lines, among those that do not write the file; what must be copied is
            then most of an edit, and copying is learnt before choosing.
        num_held_back: Demonstrations of held-back corpus functions used for evaluation.
    """

    tokenizer: str = "tiny"
    template: str = "tiny_repair"
    families: tuple[Literal["functions", "mini"], ...] = ("functions", "mini")
    context_length: Count = 512
    mini_share: Share = 0.08
    task_share: Share = 0.03
    short_first: CountOrZero = 12_000
    files_first: CountOrZero = 4_000
    lines_first: CountOrZero = 12_000
    num_held_back: CountOrZero = 192

    def contradictions(self) -> Contradictions:
        """Parts fit into the whole."""
        if self.mini_share + self.task_share > 1:
            yield "mini_share", f"and task_share = {self.task_share} are more than the whole: lower one"
        if self.task_share and "functions" not in self.families:
            yield "task_share", 'must be 0 without "functions" in families: only such tasks are broken anew'


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainNoise:
    """How imperfect the demonstrations are: a policy that imitates perfect ones only has nothing left to explore.

    Attributes:
        right_edit: Probability that an attempt is the fix.
        give_up: Probability of finishing after a failed attempt although attempts are left.
        invalid_edit: Probability that an episode begins with an edit the editor refuses; it has no weight.
        max_attempts: Edits of one episode at most.
        wrong_weight: Loss weight of a turn with a wrong edit, or of giving up.
        code_weight: Loss weight of the source as the editor shows it.
    """

    right_edit: Share = 0.55
    give_up: Share = 0.12
    invalid_edit: Share = 0.04
    max_attempts: Count = 3
    wrong_weight: Share = 0.35
    code_weight: Share = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A second, short phase with a fresh optimizer and other demonstrations, for habits rather than knowledge.

    What it does not name is as in the first phase, but that the curriculum is over and the policy is exported at the
    end only. Its learning rate falls linearly, all along.

    Attributes:
        num_tokens: Token slots in all, padding included; 0 leaves the phase out.
        learning_rate: Step size after warm-up.
        warmup_tokens: Token slots over which it rises from 0.
        micro_batches: Micro-batches of one step.
        mini_share: Part made of freshly generated functions.
        right_edit: Probability that an attempt is the fix.
        give_up: Probability of finishing after a failed attempt although attempts are left.
        max_attempts: Edits of one episode at most.
        wrong_by_kind: Draw half of the wrong edits so that each kind of edit is equally likely, as faults are drawn.
    """

    num_tokens: CountOrZero = 0
    learning_rate: PositiveFloat = 2.5e-3
    warmup_tokens: CountOrZero = 100_000
    micro_batches: Count = 2
    mini_share: Share = 0.4
    right_edit: Share = 0.55
    give_up: Share = 0.6
    max_attempts: Count = 6
    wrong_by_kind: bool = True

    def contradictions(self) -> Contradictions:
        """Nothing is set of a phase that is left out."""
        keys = [field.name for field in fields(self) if field.name != "num_tokens"]
        yield from _without_effect(self, self.num_tokens > 0, "num_tokens = 0", *keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptimizer:
    """How the imitation loss becomes an update.

    Attributes:
        kind: `muon` for the matrices with AdamW for the rest, or `adamw` for all.
        learning_rate: Step size between warm-up and decay.
        warmup_tokens: Token slots over which it rises from 0.
        decay_share: Part of the run, at its end, over which it falls linearly.
        final_share: What is left of it at the very end.
        beta1: Decay of the gradient's mean, with Adam.
        beta2: Decay of the squared gradient's mean, with Adam.
        momentum: Decay of the gradient's mean, with Muon.
        weight_decay: Decoupled decay of the weights, per unit of learning rate.
        max_grad_norm: The gradient is scaled down to this global norm; `inf` never does.
        router_weight: Weight of the loss that balances the experts.
    """

    kind: Literal["muon", "adamw"] = "muon"
    learning_rate: PositiveFloat = 6e-3
    warmup_tokens: CountOrZero = 200_000
    decay_share: Share = 0.2
    final_share: Share = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    momentum: Share = 0.95
    weight_decay: NonNegativeFloat = 0.05
    max_grad_norm: PositiveFloat = 1.0
    router_weight: NonNegativeFloat = 0.01

    def contradictions(self) -> Contradictions:
        """Muon has a momentum; Adam has none."""
        yield from _without_effect(self, self.kind == "muon", f'kind = "{self.kind}"', "momentum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretraining:
    """How long imitation goes on, and in what pieces.

    Attributes:
        num_tokens: Token slots in all, padding included.
        row_length: Token slots of one row.
        rows_per_micro_batch: Rows computed at once.
        micro_batches: Micro-batches of one step by token slots seen: pairs `[from this many on, micro-batches]`; small
            batches learn faster early.
        log_every: Optimizer steps between metric lines.
        evaluate_every: Optimizer steps between evaluations.
        checkpoint_seconds: Wall-clock seconds between checkpoints.
        export_tokens: Token slots between exports of the policy; 0 exports at the end only.
        embedding_std: Standard deviation of the embedding at the start; that of the head is this over the root of the
            width.
        recall_init: Begin with layers that look up what followed a token before.
    """

    num_tokens: Count = 30_000_000
    row_length: Count = 512
    rows_per_micro_batch: Count = 8
    micro_batches: tuple[tuple[CountOrZero, ...], ...] = ((0, 1), (3_000_000, 2), (12_000_000, 4))
    log_every: Count = 20
    evaluate_every: Count = 200
    checkpoint_seconds: Seconds = 180.0
    export_tokens: CountOrZero = 1_000_000
    embedding_std: PositiveFloat = 0.5
    recall_init: bool = True

    def contradictions(self) -> Contradictions:
        """The plan of micro-batches is one."""
        pairs = self.micro_batches
        starts = [pair[0] for pair in pairs if pair]
        if any(len(pair) != 2 or pair[1] < 1 for pair in pairs) or starts[:1] != [0] or starts != sorted(set(starts)):
            yield "micro_batches", "must be pairs of a start and a number of at least 1, starts rising from 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainRecipe:
    """Imitation of demonstrated repairs, from random weights.

    Attributes:
        kind: `pretrain`.
        run: Identity of the run; its directory receives checkpoints, metrics and the policy's Hugging Face files.
        model: Shape of the model.
        data: What it imitates.
        noise: How imperfect that is.
        optimizer: How the loss becomes an update.
        training: How long it goes on.
        continuation: What comes after it.
    """

    KIND: ClassVar[str] = "pretrain"

    kind: Literal["pretrain"] = "pretrain"
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: PretrainData = field(default_factory=PretrainData)
    noise: PretrainNoise = field(default_factory=PretrainNoise)
    optimizer: PretrainOptimizer = field(default_factory=PretrainOptimizer)
    training: Pretraining = field(default_factory=Pretraining)
    continuation: Continuation = field(default_factory=Continuation)

    def contradictions(self) -> Contradictions:
        """What no single section can see."""
        if self.training.row_length < self.data.context_length:
            yield "training.row_length", f"must be at least data.context_length = {self.data.context_length}"
        if self.continuation.num_tokens and self.continuation.mini_share + self.data.task_share > 1:
            yield (
                "continuation.mini_share",
                f"and data.task_share = {self.data.task_share} are more than the whole: lower one",
            )


# --------------------------------------------------------------------------------------------------- comparisons


@dataclass(frozen=True, kw_only=True, slots=True)
class AbInput:
    """What all arms of a comparison train on: synthetic trajectories with random advantages, drawn from a seed.

    Attributes:
        seed: Everything drawn at random derives from it.
        num_steps: Optimizer steps of each arm; later ones show what an update did to the weights.
        num_groups: Groups of one step.
        group_size: Trajectories of a group.
        context_length: Tokens of one trajectory at most.
        temperature: Of the distribution they count as sampled from.
    """

    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    num_steps: Count = 3
    num_groups: Count = 4
    group_size: Annotated[int, Range(3)] = 4
    context_length: Annotated[int, Range(8)] = 256
    temperature: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AbArms:
    """What tells the arms of a comparison apart, as settings of a training recipe: `["execution.head=plain"]`.

    Attributes:
        reference: Settings of the arm that counts as right; it runs twice, which shows how much noise there is.
        candidate: Settings of the arm that is tested against it.
    """

    reference: tuple[str, ...] = ("execution.head=plain",)
    candidate: tuple[str, ...] = ()

    def contradictions(self) -> Contradictions:
        """Each is a setting, named once, and the arms differ."""
        for arm in ("reference", "candidate"):
            given = [one.partition("=") for one in getattr(self, arm)]
            if wrong := [key for key, sign, value in given if not sign or not key.strip() or not value.strip()]:
                yield arm, f'has "{wrong[0]}": write each as "section.key=value"'
            keys = [key.strip() for key, _, _ in given]
            if twice := [key for key in keys if keys.count(key) > 1]:
                yield arm, f"sets {twice[0]} twice: remove one"
        if set(self.reference) == set(self.candidate):
            yield "candidate", "is the reference: there is nothing to compare"


@dataclass(frozen=True, kw_only=True, slots=True)
class AbBounds:
    """How far the candidate may be from the reference, relative to it: `[passes up to, fails above]`.

    Attributes:
        loss: Of a step.
        token_logdiff_absmean: Mean difference of trainer's and sampler's log-probabilities.
        entropy: Mean over tokens.
        grad_norm: Norm of the whole gradient before clipping.
        gradient: Of one parameter: the norm of the difference of both gradients.
        weights: Norm of the difference of both changes since the start, of all weights.
    """

    loss: tuple[PositiveFloat, ...] = (1e-5, 1e-5)
    token_logdiff_absmean: tuple[PositiveFloat, ...] = (5e-5, 5e-4)
    entropy: tuple[PositiveFloat, ...] = (1e-4, 1e-3)
    grad_norm: tuple[PositiveFloat, ...] = (2e-3, 1e-2)
    gradient: tuple[PositiveFloat, ...] = (2e-3, 1e-2)
    weights: tuple[PositiveFloat, ...] = (2e-3, 1e-2)

    def contradictions(self) -> Contradictions:
        """Two numbers each, of which the second is no smaller."""
        for field_ in fields(self):
            pair = getattr(self, field_.name)
            if len(pair) != 2 or pair[0] > pair[1]:
                yield field_.name, "must be two numbers, [passes up to, fails above], the second no smaller"


@dataclass(frozen=True, kw_only=True, slots=True)
class AbRecipe:
    """A comparison of two ways to train, by their gradients and updates.

    Attributes:
        kind: `ab`.
        input: What all arms train on.
        arms: In which settings they differ.
        bounds: How far they may differ in results.
        policy: The language model that is trained.
        optimizer: How the loss becomes an update.
        packing: How trajectories are laid into rows.
        mesh: The trainer's devices.
        execution: How the trainer computes the model.
        remat: What a layer keeps for its backward pass.
    """

    KIND: ClassVar[str] = "ab"

    kind: Literal["ab"] = "ab"
    input: AbInput = field(default_factory=AbInput)
    arms: AbArms = field(default_factory=AbArms)
    bounds: AbBounds = field(default_factory=AbBounds)
    policy: Policy = field(default_factory=Policy)
    optimizer: Optimizer = field(default_factory=Optimizer)
    packing: Packing = field(default_factory=Packing)
    mesh: Mesh = field(default_factory=Mesh)
    execution: Execution = field(default_factory=Execution)
    remat: Remat = field(default_factory=Remat)

    def contradictions(self) -> Contradictions:
        """What no single section can see."""
        if self.optimizer.beta1 == 1.0:
            yield "optimizer.beta1", "leaves no gradient in Adam's state, where it is read: lower it"

    def without_arms(self) -> TrainRecipe:
        """The training recipe that the arms have in common.

        No sequence is dropped for its log-probabilities: gates that drop every sequence would hide errors.
        """
        given = self.input
        return TrainRecipe(
            run=Run(seed=given.seed),
            policy=self.policy,
            rollout=Rollout(
                prompts_per_step=given.num_groups,
                generations_per_prompt=given.group_size,
                context_length=given.context_length,
                max_new_tokens=1,
                temperature=given.temperature,
            ),
            algorithm=Algorithm(
                importance="token",
                importance_cap=float("inf"),
                overlong_filter=False,
                logprob_error_threshold=float("inf"),
            ),
            optimizer=self.optimizer,
            packing=self.packing,
            mesh=self.mesh,
            execution=self.execution,
            remat=self.remat,
            training=Training(num_steps=given.num_steps),
        )


RunRecipe = TrainRecipe | PretrainRecipe
"""Any recipe whose run leaves a directory."""
Recipe = RunRecipe | AbRecipe
"""Any recipe; `kind` in the file chooses which."""

SCHEMAS: dict[str, type[TrainRecipe] | type[PretrainRecipe] | type[AbRecipe]] = {
    schema.KIND: schema for schema in (TrainRecipe, PretrainRecipe, AbRecipe)
}
