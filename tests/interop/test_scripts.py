"""Launch scripts and lists of arguments: read as bash would, never run, and written; what a file
says of the model is held against the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import PlanError
from planner.interop.arguments import read_script
from planner.interop.launchers import megatron
from planner.interop.price import read_configuration
from planner.interop.settings import Facts, Settings
from planner.machine.topology import for_devices
from planner.strategy.strategy import Strategy

LLAMA = "zoo:llama-tiny"
ARRAYS = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
WORLD_SIZE=$(($GPUS_PER_NODE*NNODES))
CHECKPOINT=$1 # <path>
TP=${TP:-4}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES)
MODEL_ARGS=(
    --num-layers 2   # of the decoder
    --hidden-size 64 \\
    --swiglu
)
TRAINING_ARGS=(--micro-batch-size 1)
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"x"})
fi
if [[ "$TP" == "4" && $GPUS_PER_NODE -ge 8 ]]; then
    TRAINING_ARGS+=("--global-batch-size 16")
elif [ "$TP" = 2 ]; then
    TRAINING_ARGS+=(--global-batch-size 32)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} --tensor-model-parallel-size $TP \\
    --sequence-parallel --save "$CHECKPOINT" > log.txt 2>&1
"""
CASES = """case "${SIZE:-small}" in
  small|tiny) TP=2; GBS=16 ;;
  *) TP=8; GBS=1024 ;;
esac
options=" \\
   --tensor-model-parallel-size ${TP} \\
   --micro-batch-size 2 --global-batch-size ${GBS}"
train() { torchrun --nproc_per_node 8 ../pretrain.py ${options} "$@"; }
train
"""
NESTED = """TP=2
ARGS=(--micro-batch-size 1 --tensor-model-parallel-size ${TP})
ARGS=("${ARGS[@]}" --use-distributed-optimizer)
CMD="
cd /somewhere;
python pretrain_gpt.py ${ARGS[@]}"
sbatch <<EOF
#SBATCH --nodes=2
srun --mpi=pmix bash -x -c "${CMD}" 2>&1 | tee out.log
EOF
"""


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (ARRAYS, (), Settings(16, data=2, tensor=4, microbatches=8, positions=True)),
        (ARRAYS, ("TP=2",), Settings(32, data=4, tensor=2, microbatches=8, positions=True)),
        (ARRAYS, ("global_batch_size=32",), Settings(32, data=2, tensor=4, microbatches=16,
                                                     positions=True)),
        (CASES, (), Settings(16, data=4, tensor=2, microbatches=2)),
        (CASES, ("SIZE=large",), Settings(1024, tensor=8, microbatches=512)),
        (NESTED, (), Settings(4, data=4, tensor=2, zero_stage=1)),
        ("--micro-batch-size=1\n--tensor-model-parallel-size 8 # all\n", (),
         Settings(1, tensor=8)),
        ("A='--micro-batch-size 1'\nB+=(--tensor-model-parallel-size 8)", (),
         Settings(1, tensor=8)),
    ],
)  # fmt: skip
def test_a_script_is_read_as_bash_would_run_it(
    text: str, overrides: tuple[str, ...], expected: Settings, tmp_path: Path
) -> None:
    found = read_configuration(written(tmp_path, "run.sh", text), 8, overrides=overrides)
    assert found.launcher == "megatron" and found.settings == expected


def test_what_is_not_known_is_asked_for_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, "run.sh", "torchrun p.py --micro-batch-size $MBS --lr $LR\n")
    with pytest.raises(PlanError, match="micro-batch-size is \\$MBS") as e:
        read_configuration(path, 8)
    assert e.value.code == "P191" and e.value.help == ("MBS=VALUE behind the file",)
    assert read_configuration(path, 8, overrides=("MBS=2",)).settings.batch == 16
    path = written(tmp_path, "run.sh", "torchrun p.py --micro-batch-size $(cat size)\n")
    with pytest.raises(PlanError, match="what a command prints"):
        read_configuration(path, 8)
    path = written(tmp_path, "run.sh", "torchrun p.py --micro-batch-size $4\n")
    assert read_configuration(path, 8, overrides=("4=2",)).settings.batch == 16
    with pytest.raises(PlanError, match="is no key=value"):
        read_configuration(path, 8, overrides=("micro",))


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"""touch {mark}
X=$(touch {mark}); Y=`touch {mark}`
: ${{Z:=$(touch {mark})}} $((a[$(touch {mark})]))
eval "touch {mark}"; . {mark}.sh
for i in 1 2; do touch {mark}; done
bash -c "touch {mark}" <<EOF
$(touch {mark})
EOF
python p.py --micro-batch-size 1
"""
    found = read_configuration(written(tmp_path, "run.sh", text), 8)
    assert found.settings.batch == 8 and not mark.exists()
    assert any("is read there, not here" in n for n in found.notes)
    assert any("a loop is not followed" in n for n in found.notes)


@pytest.mark.parametrize(
    "text",
    [
        'A="x',
        "A=(1 2",
        "A=x" + "\nA=$A$A" * 40 + "\npython p.py $A",
        "A=(x x)" + "\nA=(${A[@]} ${A[@]})" * 40 + "\npython p.py ${A[@]}",
        "if true; then " * 200,
        "bash -c " + "'" * 3,
        "A=$((1" + "+(1" * 5000 + ")" * 5001 + ")\npython p.py --micro-batch-size $A",
        "A='bash -c \"$A\"'\n" + "bash -c \"$A\"",
        "A=$((9999999999999999*9999999999999999*9))\npython p.py --micro-batch-size $A",
        "case x in",
        "${" * 500,
        "$((",
        "<<EOF",
        "python p.py --micro-batch-size ${A//x/y} ${#B[@]} ${!C}",
        "\\",
        "",
    ],
)  # fmt: skip
def test_hostile_scripts_are_errors(text: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as e:
        read_configuration(written(tmp_path, "run.sh", text), 8)
    assert e.value.code in ("P190", "P191")


def test_of_a_key_that_is_there_twice_the_last_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "run.sh",
        "python p.py --micro-batch-size 1 --micro-batch-size 2 --my-flag --nnodes 3\n",
    )
    found = read_configuration(path, 8)
    assert found.settings.batch == 16 and found.unread == ("--my-flag", "--nnodes")
    assert found.notes == ("--micro-batch-size is 1 and later 2: the last counts",)


def test_processes_that_are_not_the_devices_are_told(tmp_path: Path) -> None:
    found = read_configuration(written(tmp_path, "run.sh", ARRAYS), 16)
    assert "it starts 8 processes, and is priced on 16 devices" in found.notes
    assert not any("processes" in n for n in read_configuration(tmp_path / "run.sh", 8).notes)


def test_layers_of_a_virtual_stage_are_counted_by_the_layers(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "run.args",
        "--micro-batch-size 1\n--pipeline-model-parallel-size 4\n--global-batch-size 16\n"
        "--num-layers-per-virtual-pipeline-stage 2\n",
    )
    found = read_configuration(path, 8, layers=lambda: 16)
    assert (found.settings.virtual_stages, found.settings.schedule) == (2, "interleaved")
    same = read_configuration(path, 8, overrides=("num_layers=16",))
    assert same.settings == found.settings
    with pytest.raises(PlanError, match="15 layers do not divide"):
        read_configuration(path, 8, layers=lambda: 15)


@pytest.mark.parametrize("suffix", megatron.FORMS)
def test_every_form_says_the_same(suffix: str, tmp_path: Path) -> None:
    for s in (
        Settings(64, stage=4, data=2, tensor=2, microbatches=8, zero_stage=2, recompute="block",
                 schedule="interleaved", positions=True, length=128, virtual_stages=2),
        Settings(16, data=4, expert=2, sequence=2, microbatches=2, zero_stage=1),
        Settings(8),
    ):  # fmt: skip
        facts = Facts("a'b\"c", for_devices("h100-sxm", s.devices), 8)
        path = written(tmp_path, f"plan{suffix}", megatron.FORMS[suffix](s, facts))
        found = read_configuration(path, s.devices)
        assert (found.settings, found.notes, found.unread) == (s, (), ())


def test_what_a_file_says_of_the_model_must_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(text: str) -> int:
        path = written(tmp_path, "run.sh", f"torchrun p.py --micro-batch-size 1 {text}\n")
        return main(["import", path, "--model", LLAMA, "--devices", "8", "--quiet", "--force",
                     "-o", str(tmp_path / "x.json")])  # fmt: skip

    assert read("--num-layers 80 --hidden-size 8192 --ffn-hidden-size 176") == 2
    err = capsys.readouterr().err
    assert "error[P191]" in err and "num_layers = 80 and hidden_size = 8192" in err
    assert "2 layers and a hidden size of 64" in err
    for text, said in (
        ("--num-attention-heads 8", "4 attention heads"),
        ("--ffn-hidden-size 4096", "no weight 4096 wide"),
        ("--group-query-attention --num-query-groups 4", "2 key-value heads"),
        ("--vocab-size 600", "a vocabulary of 512"),
        ("--seq-length 4096", "rows of 4096 tokens"),
    ):
        assert read(text) == 2 and said in capsys.readouterr().err
    assert read("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 176"
                " --vocab-size 500 --seq-length 16 --num-query-groups 1") == 0  # fmt: skip


def test_nothing_is_added(tmp_path: Path) -> None:
    """A file without offload has none, whatever fits."""
    path = written(tmp_path, "run.sh", "torchrun p.py --micro-batch-size 1\n")
    out = tmp_path / "x.json"
    assert main(["import", path, "--model", LLAMA, "--devices", "8", "--quiet", "-o", str(out),
                 "--memory-limit", "200KiB"]) == 0  # fmt: skip
    made = Strategy.load(out)
    assert made.cost.fit == "no" and made.techniques["offload"] == []


@pytest.mark.parametrize("options", [[], ["--memory-limit", "200KiB"]])
def test_columns_come_before_rows(options: list[str], tmp_path: Path) -> None:
    """The layout that is priced is Megatron's, where nothing fits too: it is no other program."""
    text = "torchrun p.py --micro-batch-size 1 --tensor-model-parallel-size 2\n"
    path, out = written(tmp_path, "run.sh", text), tmp_path / "x.json"
    assert main(["import", path, "--model", LLAMA, "--devices", "8", "--quiet", "-o", str(out),
                 *options]) == 0  # fmt: skip
    layouts = {
        row["label"].removesuffix(".weight").rpartition(".")[2]: row["layout"]
        for row in Strategy.load(out).tensors.values()
        if len(row["layout"]) == 2 and row.get("label", "").endswith(".weight")
    }
    rows = {"embed_tokens", "o_proj", "down_proj"}
    assert layouts == {
        name: [["tensor"], []] if name in rows else [[], ["tensor"]]
        for name in (*rows, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    }


def test_a_script_that_is_exported_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import planner

    plan_file, out = str(tmp_path / "plan.json"), str(tmp_path / "args.sh")
    planner.plan(
        LLAMA, devices=8, batch=16, pins="tp=2,dp=4,zero=1", launcher="megatron", baselines=False
    ).save(plan_file)
    assert main(["export", plan_file, "--to", "megatron", "-o", out]) == 0
    assert "PLANNED_ARGS=(\n    --tensor-model-parallel-size 2\n" in Path(out).read_text()
    mine = str(tmp_path / "mine.json")
    assert main(["import", out, "--model", LLAMA, "--devices", "8", "-o", mine]) == 0
    assert json.loads(Path(mine).read_text())["mesh"]
    assert "not read" not in capsys.readouterr().err


def test_options_before_the_program_are_not_its_own(tmp_path: Path) -> None:
    found = read_script(
        "srun --nodes=4 python -u -m maxtext.train configs/base.yml a=1 b.c='x y' --d -1\n",
        tmp_path / "x.sh",
        {},
    )
    assert found.table == {"a": 1, "b.c": "x y", "--d": -1}
    assert found.files == ("configs/base.yml",) and found.notes == []
