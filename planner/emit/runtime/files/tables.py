"""What every program defines before the functions of this folder: declared here with empty values,
so that the functions can be read and checked. Programs are written without this file and bring
every name themselves: what is raised here is met only by who calls a function of this folder
outside a program.

    MESH              axis -> size, outermost first
    COMPUTE           dtype of parameters and activations
    STATE             dtype of the optimizer's moments, and of master copies of parameters where it
                      is longer than theirs
    GPU_MEMORY        share of a GPU's memory to preallocate, None where no GPU is planned for
    LEARNING_RATE, WARMUP_STEPS, SCHEDULE, END_FRACTION, STEPS   see `learning_rate`
    CLIP_NORM         gradients are scaled down to this global norm; 0: they are not
    NORM_LOGGED       whether a step returns the norm of its gradients, clipped or not
    ITEMS, ITEM       how many of what a step trains on: tokens or samples; 0 where not known
    MODEL_FLOPS, PEAK_FLOPS   of a step over all devices, half of causal attention left out; of a
                      planned device a second; 0 where not known
    LOSS_SCALE        what the loss is multiplied by at first, of float16 programs
    WEIGHT_ROWS       rows that the weight of a microbatch is counted in, where it is those of its
                      loss that count
    NO_DECAY          parameters, or weights in buffers of uneven stages, that weight decay leaves
    ORTHOGONALISED    parameters, of programs whose optimizer has any, whose last two dims are
                      matrices that it orthogonalises
    TOGETHER          of these, where repeats of a block are arrays of their own: those of all
                      repeats
    BATCH             samples of a step (0: inputs have no common first dim)
    INPUTS            name -> (global shape, dtype, integers below this or 0, PartitionSpec)
    PARAMS, FROZEN    name -> (shape, dtype, repeats stacked along the first dim or 0, mean of a
                      fresh start, PartitionSpec)
    HOST_TABLES       parameters that hold rows of embedding tables on hosts -> (rows of the table,
                      inputs with their numbers)
    LABELS            stacked parameter -> names in the weights file, where the repeats do not count
                      from 0
    EXTERNAL          name in the weights file (* counts repeats) -> (file, dtype, offset of each
                      repeat, shape, steps) of the model's own data files
    MODEL_FOLDER      where the model's own data files lie, from the program's folder
    GRADIENTS         parameter -> (axes over which its gradient is a sum still pending when the
                      backward pass ends, the axes of these it is summed over, the axes it is
                      scattered over, the dim scattered, PartitionSpec of reduced gradient and
                      optimizer state); jit programs have the PartitionSpec alone
    OVERLAPPED_MICROBATCHES   microbatches that run at the same time
    ISLANDS           microbatches that each place along the axis "island" runs, of programs with
                      unequal shares
    OFFLOADED         parameters that lie in the host's memory, with their gradients
    FUSED             collectives that GPUs send together -> up to so many bytes; none where that is
                      left to the compiler
    SAME_GRADIENT     parameters whose gradient is another's, in programs with microbatches -> that
                      other: it is reduced once for both
    GATHERED          parameters gathered outside repeated blocks, in programs with microbatches
    SCATTER_EACH_MICROBATCH   whether gradients are scattered in every microbatch
    CARRIED           tensors handed from one pipeline stage to the next
    VIRTUAL_STAGES, PER_VIRTUAL_STAGE   virtual stages that a stage holds, and the parameters whose
                      first dim counts them
    WEIGHTS_APART     parameters of blocks whose gradients are made apart from the backward pass
    ONLY_BLOCKS, ONLY_EPILOGUE   trained parameters that only `stage_blocks`, or only `epilogue`,
                      reads
    STAGE_BUFFERS     buffer of weights of uneven stages -> of each weight in it (number of its
                      virtual stage, first element, shape of a device's piece, whole shape, mean
                      of a fresh start, PartitionSpec), in the order of LABELS
    PARTS             of buffers of weights, in which they are updated where the optimizer's state
                      lies in the host's memory
    HANDED, HANDED_SIZES   of each virtual stage, what it gets: (axes, first element, shape) of each
                      tensor; axes -> elements of the buffer that is handed on
    PATHS             per microbatch of a tick, of uneven stages: the place along axis stage at
                      which each stage runs it
    FIRST_BACKWARD    tick of the first backward pass of uneven stages
    OUTPUT_SPECS      PartitionSpecs of an inference program's outputs
    TRANSFORM         an optax transformation, of programs that take `transform` for an optimizer

and by programs that generate, whose two phases are `prompts` and `step`:
    PROMPT, GENERATE  tokens of a prompt, and generated
    ROWS, WAVE        sequences in all, and whose prompts are passed at once
    VOCABULARY        tokens that there are
    IDS, MASK, POSITIONS   inputs: token ids, which tokens are real, where they stand
    WINDOWS           inputs of a step that say which slots of a cache are seen that keeps some
                      tokens alone -> how many, and whether a chunk's instead of the last
    PROMPTS_INPUTS, STEP_INPUTS, PROMPTS_OUTPUT_SPECS, STEP_OUTPUT_SPECS   as INPUTS and
        OUTPUT_SPECS
    CACHE             the caches of keys and values, as FROZEN; the last dims are heads, positions,
                      features
    CACHE_TYPE        of what is in them; None: COMPUTE
    BEFORE, STATES    what convolutions and linear attention keep of earlier tokens, as FROZEN; the
                      first in COMPUTE, the others float32
    QUANTIZED         weight in a byte -> (its scales, the dim that each is taken over, whether its
                      dims are the other way round than in the model's files), both in FROZEN
    WEIGHT_TYPE       of those weights: int8 or float8_e4m3fn
"""

from __future__ import annotations

from typing import Any

MESH: dict[str, int] = {}
COMPUTE: Any = None
STATE: Any = None
TRANSFORM: Any = None
GPU_MEMORY: float | None = None
BATCH = 0
INPUTS: dict[str, tuple[Any, ...]] = {}
PARAMS: dict[str, tuple[Any, ...]] = {}
FROZEN: dict[str, tuple[Any, ...]] = {}
HOST_TABLES: dict[str, tuple[int, tuple[str, ...]]] = {}
LABELS: dict[str, tuple[str, ...]] = {}
EXTERNAL: dict[str, tuple[Any, ...]] = {}
MODEL_FOLDER = ""
LEARNING_RATE = 0.0
WARMUP_STEPS = 0
SCHEDULE = "constant"
END_FRACTION = 0.0
CLIP_NORM = 0.0
NORM_LOGGED = False
LOSS_SCALE = 1.0
WEIGHT_ROWS = 1
ITEMS = 0
ITEM = ""
MODEL_FLOPS = 0.0
PEAK_FLOPS = 0.0
NO_DECAY: set[str] = set()
ORTHOGONALISED: set[str] = set()
TOGETHER: tuple[tuple[str, ...], ...] = ()
STEPS = 1
MICROBATCHES = 1
OVERLAPPED_MICROBATCHES = 1
ISLANDS: tuple[int, ...] = ()
GRADIENTS: dict[str, tuple[Any, ...]] = {}
FUSED: dict[str, int] = {}
OFFLOADED: set[str] = set()
OUTPUT_SPECS: tuple[Any, ...] = ()
PROMPT = GENERATE = VOCABULARY = ROWS = WAVE = 1
IDS = MASK = POSITIONS = ""
WINDOWS: dict[str, tuple[int, bool]] = {}
PROMPTS_INPUTS: dict[str, tuple[Any, ...]] = {}
STEP_INPUTS: dict[str, tuple[Any, ...]] = {}
PROMPTS_OUTPUT_SPECS: tuple[Any, ...] = ()
STEP_OUTPUT_SPECS: tuple[Any, ...] = ()
CACHE_TYPE: Any = None
CACHE: dict[str, tuple[Any, ...]] = {}
BEFORE: dict[str, tuple[Any, ...]] = {}
STATES: dict[str, tuple[Any, ...]] = {}
QUANTIZED: dict[str, tuple[str, int, bool]] = {}
WEIGHT_TYPE: Any = None
PRODUCTS_APART = False
SAME_GRADIENT: dict[str, str] = {}
GATHERED: set[str] = set()
SCATTER_EACH_MICROBATCH = False
CARRIED = 1
VIRTUAL_STAGES = 1
PER_VIRTUAL_STAGE: set[str] = set()
WEIGHTS_APART: set[str] = set()
ONLY_BLOCKS: set[str] = set()
ONLY_EPILOGUE: set[str] = set()
STAGE_BUFFERS: dict[str, tuple[Any, ...]] = {}
PARTS = 1
HANDED: tuple[Any, ...] = ()
HANDED_SIZES: dict[tuple[str, ...], int] = {}
FIRST_BACKWARD = 0
PATHS: tuple[tuple[int, ...], ...] = ((0,),)


def loss_of(params: Any, frozen: Any, batch: Any) -> Any:
    """The program's own: mean loss of one microbatch, and the number of rows that count where that
    is a part of the data. Of OVERLAPPED_MICROBATCHES microbatches the sum of their losses, or where
    rows count, or they are the whole batch, their common mean."""
    raise NotImplementedError


def prologue(params: Any, frozen: Any, batch: Any) -> Any:
    """The program's own, with pipeline stages: what the blocks are given."""
    raise NotImplementedError


def stage_blocks(params: Any, frozen: Any, batch: Any, x: Any, virtual: Any = 0) -> Any:
    """The program's own, with pipeline stages: the blocks of this stage, or of one virtual
    stage."""
    raise NotImplementedError


def epilogue(params: Any, frozen: Any, batch: Any, x: Any) -> Any:
    """The program's own, with pipeline stages: loss of one microbatch times its weight, and the
    weight, from what leaves the last block."""
    raise NotImplementedError


def each_stage() -> Any:
    """The program's own, with uneven pipeline stages: the functions of the virtual stages, in
    the order of the model."""
    raise NotImplementedError


def forward(params: Any, frozen: Any, batch: Any) -> Any:
    """The program's own: outputs of an inference program."""
    raise NotImplementedError


def prompts_forward(params: Any, frozen: Any, batch: Any) -> Any:
    """The program's own, where it generates: (first tokens, keys and values of the prompts ...)."""
    raise NotImplementedError


def step_forward(params: Any, frozen: Any, batch: Any) -> Any:
    """The program's own, where it generates: (next tokens, keys and values of the tokens given
    ...)."""
    raise NotImplementedError
