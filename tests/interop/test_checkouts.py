"""Configurations as they lie in the projects' own folders: recipes that import others, scripts that
source and start others, files that build on others or name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanError
from planner.interop.keys import read_keys
from planner.interop.price import Configuration, read_configuration
from planner.interop.settings import Settings
from planner.interop.tables import load

FILES = {
    "pkg/recipes/common.py": """
ROWS = 2
def _pretrain():
    cfg = Container(train=Train(global_batch_size=64, micro_batch_size=ROWS), ddp=Ddp(), model=None)
    cfg.optimizer = Optimizer(use_distributed_optimizer=True)
    cfg.ddp.use_distributed_optimizer = False
    cfg.ddp.grad_reduce_in_fp32 = True
    cfg.tokenizer.vocab_size = 32000
    return cfg
def _lay_out(model, layout=None):
    if layout is not None:
        model.pipeline_model_parallel_layout = layout
        return
    stages = model.pipeline_model_parallel_size or 1
    try:
        model.pipeline_model_parallel_layout = _known(stages, 1)
    except ValueError:
        pass
def _known(stages, chunks):
    table = {(2, 1): [["embedding"] + ["decoder"] * 3, ["decoder"] * 3 + ["loss"]]}
    if (stages, chunks) not in table:
        raise ValueError("none")
    return table[(stages, chunks)]
""",
    "pkg/recipes/__init__.py": "from .common import _pretrain as pretrain_config\n",
    "pkg/precision.py": """
def bf16():
    return Mixed(bf16=True, grad_reduce_in_fp32=True)
def perf(word):
    if word == "bf16":
        cfg = bf16()
    elif word == "fp8":
        cfg = bf16()
        cfg.fp8 = "hybrid"
    else:
        raise ValueError(word)
    if not isinstance(cfg, str):
        cfg.grad_reduce_in_fp32 = False
    return cfg
""",
    "pkg/perf/mine.py": """
from pkg.precision import *
from pkg.recipes import pretrain_config
from ..recipes.common import _lay_out

def mine_config():
    cfg = pretrain_config()
    cfg.mixed_precision = perf("bf16")
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "block"
    cfg.model.recompute_num_layers = 1
    cfg.model.num_layers = 6
    _lay_out(cfg.model)
    return cfg

def other_config():
    cfg = mine_config()
    cfg.model.pipeline_model_parallel_size = 3
    cfg.model.num_layers = 6
    cfg.model.recompute_num_layers = 2
    _lay_out(cfg.model, "Ett|tt|ttL")
    return cfg
""",
}


def laid_out(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_recipes_that_import_others_are_followed(tmp_path: Path) -> None:
    file = laid_out(tmp_path, FILES) / "pkg/perf/mine.py"
    found = read_configuration(f"{file}:mine_config", 8)
    assert found.settings == Settings(
        64, stage=2, data=2, tensor=2, microbatches=16, zero_stage=1, schedule="1f1b",
        precision="bf16-mixed",
    )  # fmt: skip
    assert found.notes == (
        "recompute of 1 of a stage's 3 layers (recompute_method block) is priced as recompute of"
        " none",
        "ddp.grad_reduce_in_fp32 = True is left out: mixed_precision.grad_reduce_in_fp32 = False"
        " counts",
    )
    assert [c.key for c in found.claims] == ["num_layers"]  # the tokenizer's words are not its own
    other = read_configuration(f"{file}:other_config", 12)
    assert other.settings.stage == 3 and other.settings.recompute == "block"


def test_modules_that_are_imported_whole(tmp_path: Path) -> None:
    """NeMo's recipes for long rows call those of the model by its module."""
    files = {
        "nemo/recipes/small.py": "def recipe(tensor=1, length=8):\n"
        "    return Config(strategy=S(tensor_model_parallel_size=tensor), micro_batch_size=1,"
        " seq_length=length)\n",
        "nemo/recipes/long.py": "from nemo.recipes import small as base\n"
        "def f():\n    r = base.recipe(tensor=4, length=64)\n"
        "    r.trainer = Trainer(devices=4, num_nodes=4)\n    return r\n",
    }
    found = read_configuration(f"{laid_out(tmp_path, files) / 'nemo/recipes/long.py'}:f", 8)
    assert (found.settings.tensor, found.settings.length) == (4, 64)
    assert found.notes == ("it starts 16 processes, and is priced on 8 devices",)


def test_a_file_alone_says_what_it_does_not_know(tmp_path: Path) -> None:
    """The same recipe without its checkout."""
    path = tmp_path / "mine.py"
    path.write_text(FILES["pkg/perf/mine.py"])
    with pytest.raises(PlanError, match="micro_batch_size is missing"):
        read_configuration(f"{path}:mine_config", 8)


def test_files_that_import_each_other_in_a_circle(tmp_path: Path) -> None:
    files = {
        "a.py": "from b import *\nfrom b import C\ndef f():\n    return Config(tensor_parallel_degree=1, x=C)\n",
        "b.py": "from a import *\nfrom a import C\n",
    }
    file = laid_out(tmp_path, files) / "a.py"
    assert read_configuration(f"{file}:f", 8).settings.batch == 64  # the default of 8 a device
    (tmp_path / "b.py").write_text("def C(:\n")
    assert read_configuration(f"{file}:f", 8).settings.batch == 64


@pytest.mark.parametrize("recipe", ["Float8LinearConverter", "MXFP8LinearConverter", "NVFP4Linear"])
def test_converters_of_a_registry_say_the_precision(recipe: str, tmp_path: Path) -> None:
    files = {
        "models.py": "def model_registry(flavor, converters=None):\n    return Spec(name=flavor)\n",
        "c.py": "from models import model_registry\ndef f():\n    return Config(local_batch_size=1,"
        f" model_spec=model_registry('8B', converters=[{recipe}.Config(x=1)]))\n",
    }
    found = read_configuration(f"{laid_out(tmp_path, files) / 'c.py'}:f", 8)
    assert found.settings.precision == "fp8"
    assert ("priced as" in found.notes[-1]) and ("selective" in found.notes[-1]) == (
        recipe[0] == "F"
    )


def test_of_a_learner_and_a_generator_the_learner_is_priced(tmp_path: Path) -> None:
    text = """
def f():
    return Config(
        trainer=Trainer(parallelism=P(tensor_parallel_degree=2), training=T(local_batch_size=1)),
        generator=Generator(parallelism=P(tensor_parallel_degree=4)),
    )
"""
    (tmp_path / "c.py").write_text(text)
    found = read_configuration(tmp_path / "c.py", 8)
    assert found.settings.tensor == 2
    assert found.notes[-1].startswith(
        "generator.parallelism.tensor_parallel_degree = 4 is left out"
    )


def test_scripts_that_others_source_and_start(tmp_path: Path) -> None:
    files = {
        "conf/sizes.sh": "TP=${TP:-2}\nEXTRA=(--global-batch-size 32)\n",
        "run/base.sh": "MICRO=$1\nshift_not=0\ntorchrun train.py --micro-batch-size $MICRO"
        ' --tensor-model-parallel-size $2 "${EXTRA[@]}"\nexit 0\n',
        "run/mine.sh": "DIR=$(dirname $0)\nsource $DIR/../conf/sizes.sh\n"
        "if [ -z $LOAD ]; then\n  echo set LOAD\n  exit 1\nfi\nbash run/base.sh 2 ${TP}\n",
        "run/circle.sh": "source run/circle.sh\nbash ./circle.sh\n",
    }
    folder = laid_out(tmp_path, files)
    found = read_configuration(folder / "run/mine.sh", 8)
    assert found.settings == Settings(32, data=4, tensor=2, microbatches=4)
    assert found.notes == ("line 5: exit 1 is passed over",)
    assert read_configuration(folder / "run/mine.sh", 8, overrides=["TP=4"]).settings.tensor == 4
    with pytest.raises(PlanError, match="no key of"):
        read_configuration(folder / "run/circle.sh", 8)


def test_configurations_that_are_built_on_others(tmp_path: Path) -> None:
    files = {
        "configs/base.yml": "per_device_batch_size: 12\nmax_target_length: 64\nsteps: 1\n",
        "configs/middle.yml": "base_config: base.yml\nmax_target_length: 32\nlog_period: 1\n",
        "configs/tpu/mine.yml": "base_config: middle.yml\nper_device_batch_size: 2\n",
        "configs/tpu/lost.yml": "base_config: none.yml\nper_device_batch_size: 2\n",
        "scripts/run.sh": 'python3 -m maxtext.train "${ROOT:-$PWD}"/configs/tpu/mine.yml x=1\n',
    }
    folder = laid_out(tmp_path, files)
    for name in ("configs/tpu/mine.yml", "scripts/run.sh"):
        found = read_configuration(folder / name, 8)
        assert (found.settings.batch, found.settings.length, found.notes) == (16, 32, ())
        assert set(found.unread) <= {"log_period", "x"}  # of base.yml nothing: it has all there are
    lost = read_configuration(folder / "configs/tpu/lost.yml", 8)
    assert lost.notes == ("none.yml, which base_config names, is not there: it is not read",)


def test_deepspeeds_file_is_found_from_a_folder_above(tmp_path: Path) -> None:
    files = {
        "examples/deepspeed/z3.json": '{"zero_optimization": {"stage": 3}}',
        "examples/train/sft.yaml": "deepspeed: examples/deepspeed/z3.json\n"
        "per_device_train_batch_size: 1\nfinetuning_type: lora\nlora_rank: 8\noptim: sgd\n",
    }
    found = read_configuration(laid_out(tmp_path, files) / "examples/train/sft.yaml", 8)
    assert found.settings.zero_stage == 3
    assert found.notes == (
        "adapters (finetuning_type: lora) are left out, and all parameters priced as trained:"
        " --lora rank=8,targets=GLOB prices adapters",
        "the optimizer is sgd: --optimizer sgd prices its state",
    )


def test_tables_that_a_file_names_one_by_one(tmp_path: Path) -> None:
    """MaxText's benchmarks: a dictionary of models, each with parameters of its own."""
    text = """
MODELS = {}
def add(models, model):
    models[model.name] = model
    return model
small = add(MODELS, Model(name="small", tuning_params={"per_device_batch_size": 1}))
large = add(MODELS, Model(name="large", tuning_params={"per_device_batch_size": 4}))
"""
    file = laid_out(tmp_path, {"models.py": text}) / "models.py"
    assert read_configuration(f"{file}:large", 8).settings.batch == 32
    with pytest.raises(PlanError, match="several configurations: small, large"):
        read_configuration(file, 8)
    with pytest.raises(PlanError, match="no function 'larg'"):
        read_configuration(f"{file}:larg", 8)


def test_what_a_function_may_return_is_not_nothing(tmp_path: Path) -> None:
    """Adapters by a scheme that an if decides on which nobody knows."""
    text = """
def scheme(word, other=None):
    if word.lower() == "none":
        return None
    if isinstance(word, Adapters):
        return word
    if word.lower() == "lora":
        return Adapters()
    if somewhere.else_(other):
        return Adapters(dim=word)
def f(word="LoRA"):
    cfg.train.micro_batch_size = 1
    cfg.peft = scheme(word)
    cfg.model.tensor_model_parallel_size = 2
    return cfg
def g():
    return f("None")
def h():
    return f("DoRA")
"""
    file = laid_out(tmp_path, {"c.py": text}) / "c.py"
    for name in "fh":
        assert any("adapters (peft)" in n for n in read_configuration(f"{file}:{name}", 8).notes)
    assert not any("adapters" in n for n in read_configuration(f"{file}:g", 8).notes)


def test_sizes_that_are_computed_are_held_against_nothing(tmp_path: Path) -> None:
    """A key that decides the price is an error, one that does not is none."""
    text = """
def f():
    cfg.train.micro_batch_size = 1
    cfg.model.num_layers = layers_of(x)
    cfg.ddp.outer_dp_sharding_strategy = strategy(x)
    return cfg
"""
    (tmp_path / "c.py").write_text(text)
    found = read_configuration(f"{tmp_path / 'c.py'}:f", 8)
    assert found.claims == ()
    assert found.notes[-1].startswith("outer_dp_sharding_strategy is left out")
    (tmp_path / "c.py").write_text(text.replace("micro_batch_size = 1", "micro_batch_size = n()"))
    with pytest.raises(PlanError, match="train.micro_batch_size is computed where the file runs"):
        read_configuration(f"{tmp_path / 'c.py'}:f", 8)


def test_torchtitans_own_default_of_recompute(tmp_path: Path) -> None:
    """By operator, where a file of Python says nothing of it and counts no rows."""
    found = read(tmp_path, "c = Config(parallelism=P(tensor_parallel_degree=2))\n", 8, "c.py")
    assert found.settings.recompute == "block-keep" and found.notes == ()


def read(folder: Path, text: str, devices: int = 8, name: str = "c.yaml") -> Configuration:
    (folder / name).write_text(text)
    return read_configuration(folder / name, devices)


def test_merged_tables_and_keys_that_name_others(tmp_path: Path) -> None:
    text = """
base: &base {micro_batch_size: 1, seq_length: 8, hidden: 16}
model:
  <<: *base
  seq_length: 32
  inner: ${multiply:4, ${.hidden}}
  length: ${model.seq_length}
  name: ${training.model.length}x
  circle: ${.circle}
"""
    (tmp_path / "c.yaml").write_text(text)
    model = load(tmp_path / "c.yaml")["model"]
    assert (model["micro_batch_size"], model["seq_length"]) == (1, 32)
    assert (model["inner"], model["length"], model["name"]) == (64, 32, "32x")
    assert model["circle"] == "${.circle}"


def test_a_key_twice_matters_where_it_is_read(tmp_path: Path) -> None:
    both = "micro_batch_size: 1\nlog: 1\nlog: 2\n"
    assert read(tmp_path, both).settings.batch == 8
    sections = "a: {micro_batch_size: 1}\na: {micro_batch_size: 2}\n"
    with pytest.raises(PlanError, match="contradict each other") as e:
        read(tmp_path, sections)
    assert e.value.help == ("leave one of them, or micro_batch_size=VALUE behind the file",)
    (tmp_path / "c.yaml").write_text("seq_length: 8\nencoder_seq_length: 16\nmicro_batch_size: 1\n")
    keys, _ = read_keys(tmp_path / "c.yaml", ["seq_length=32"], lambda table: True)
    assert keys.whole(0, "seq_length", "encoder_seq_length") == 32


def test_nemos_files_are_megatrons(tmp_path: Path) -> None:
    text = """
trainer: {precision: bf16, devices: 8}
model:
  micro_batch_size: 1
  global_batch_size: 16
  tensor_model_parallel_size: 2
  fsdp: false
  fsdp_sharding_strategy: full
  vision_encoder: {hidden_size: 3}
  hidden_size: 64
"""
    found = read(tmp_path, text)
    assert found.launcher == "megatron" and found.settings.precision == "bf16-fp32-grads"
    assert any("vision_encoder.hidden_size = 3 is left out" in n for n in found.notes)


@pytest.mark.parametrize(
    ("text", "project"),
    [
        ("base_model: x/y\nmicro_batch_size: 2\nfsdp_version: 2\n", "axolotl"),
        ("model_class: llm\nmicro_batch_size: 2\ndist_config: {name: fsdp2}\n", "LLaMA-Factory v1"),
        ("base_model: x/y\ndatasets: a\ndeepspeed: nowhere.json\n", "axolotl"),
        ("tokens:\n  micro_batch_size: 2\n  batch_accumulation_per_replica: 1\n", "nanotron"),
        ("pipe_parallel_size: 2\ntrain_micro_batch_size_per_gpu: 4\n", "GPT-NeoX"),
        ("device_train_microbatch_size: auto\nmax_seq_len: 8\n", "LLM Foundry"),
    ],
)
def test_projects_that_are_not_read_are_told_by_name(
    text: str, project: str, tmp_path: Path
) -> None:
    """Some of their keys are called as Megatron's, and mean something else."""
    with pytest.raises(PlanError, match=f"a configuration of {project}, which is not read") as e:
        read(tmp_path, text)
    assert e.value.code == "P190" and "docs/exchange.md" in e.value.help[-1]


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """A few lines whose aliases stand for a thousand million values, or for themselves."""
    rows = ["a0: &a0 {k: x}"]
    for i in range(1, 10):
        rows.append(f"a{i}: &a{i} {{" + ", ".join(f"k{j}: *a{i - 1}" for j in range(10)) + "}")
    for text in ("\n".join(rows), "a: &a {b: *a}\n"):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        with pytest.raises(PlanError, match="aliases stand for more than"):
            load(file)
