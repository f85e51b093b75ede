"""Published configurations: what experts ran, and the launcher that they ran it with.

A row has the degrees of parallelism, the number of virtual stages, the ZeRO stage, the microbatch
and the precision as far as they were published; what was not is left open. Models are those of the
zoo, or have the published sizes. Where the zoo's operators differ, the work is the same: Nemotron's
feed-forwards without a gate (4 h wide) are gated ones of 8/3 h, which have as many weights and
FLOPs; GPT-OSS attends to everything in all layers, and Qwen3's heads have no norm. Experts
spread over more ranks than there are replicas (folded over tensor or context ranks) are spread over
the replicas.

Sources: Narayanan et al. 2021, table 1; Megatron-LM's README, weak scaling on H100 (d98e8a6);
NVIDIA NeMo's performance summary 25.02 and its page on long sequences; NVIDIA Megatron-Bridge's
performance summary (067f987) and its archive; torchtitan's benchmarks (llama3_h100_202412 and those
of asynchronous tensor parallelism); IBM's fms-fsdp; Groeneveld et al. 2024 (OLMo); the Llama 3
paper, table 4; Nemotron-4 340B's technical report, table 2; the DeepSeek-V3 report, section 3.2;
MaxText's recipes (AI-Hypercomputer/tpu-recipes for TPU v6e and Ironwood, maxtext_v5p_model_configs).
OLMo's devices and batch, Nemotron-4 340B's on 1,536 devices and DeepSeek-V3's 2,048 devices and
15,360 sequences are recalled: they were not held against the papers again.
"""

from __future__ import annotations

from dataclasses import dataclass

MIXED, FP8 = "bf16-mixed", "fp8"


@dataclass(frozen=True)
class Expert:
    """A published configuration: batch is the global one, pins as after --pin, launcher as after
    --for."""

    name: str
    spec: str
    hardware: str
    devices: int
    batch: int
    pins: str
    launcher: str
    source: str
    precision: str = MIXED


@dataclass(frozen=True)
class Degrees:
    """Degrees as they are published: expert parallelism is a part of the data ranks. 0 and "" where
    a figure was not published; microbatch: rows of a replica."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    zero: int = -1
    microbatch: int = 0
    recompute: str = ""

    def pins(self, devices: int, batch: int) -> str:
        """As pins of so many devices."""
        replicas = devices // (self.tp * self.pp * self.cp)
        mesh = {
            "pp": self.pp,
            "dp": replicas // self.ep,
            "ep": self.ep,
            "cp": self.cp,
            "tp": self.tp,
        }
        told = [f"{name}={n}" for name, n in mesh.items() if n > 1]
        told += [f"vpp={self.vpp}"] if self.vpp > 1 else []
        told += [f"zero={self.zero}"] if self.zero >= 0 else []
        told += [f"micro={batch // replicas // self.microbatch}"] if self.microbatch else []
        told += [f"recompute={self.recompute}"] if self.recompute else []
        return ",".join(told)


def _gpt(layers: int, hidden: int, heads: int, seq: int, vocab: int) -> str:
    """A GPT of the zoo."""
    return f"zoo:gpt,layers={layers},hidden={hidden},heads={heads},seq={seq},vocab={vocab}"


def _narayanan(
    billions: str, model: tuple[int, int, int], degrees: tuple[int, int], devices: int, batch: int
) -> Expert:
    """A row of Narayanan et al. 2021, table 1: (layers, hidden, heads), (tensor, stages)."""
    pins = Degrees(*degrees, zero=0).pins(devices, batch)
    spec = _gpt(*model, 2048, 51200)
    return Expert(
        f"GPT {billions}B", spec, "a100-80gb", devices, batch, pins, "megatron", "Narayanan"
    )


def _weak(
    billions: str, model: tuple[int, int, int], degrees: tuple[int, int], devices: int, batch: int
) -> Expert:
    """A row of Megatron-LM's weak scaling on H100: 48 replicas, distributed optimizer."""
    pins = Degrees(*degrees, zero=1).pins(devices, batch)
    spec = _gpt(*model, 4096, 131072)
    return Expert(
        f"GPT {billions}B", spec, "h100-sxm", devices, batch, pins, "megatron", "Megatron-LM"
    )


def _bridge(
    name: str, spec: str, machine: tuple[str, int], batch: int, degrees: Degrees, precision: str
) -> Expert:
    """A row of NVIDIA's performance summaries: machine is (hardware, devices)."""
    hardware, devices = machine
    pins = degrees.pins(devices, batch)
    return Expert(name, spec, hardware, devices, batch, pins, "megatron", "NVIDIA", precision)


def _fsdp(
    name: str, spec: str, machine: tuple[str, int], batch: int, launcher: str, source: str
) -> Expert:
    """Fully sharded data parallelism over all devices."""
    hardware, devices = machine
    return Expert(name, spec, hardware, devices, batch, f"dp={devices},zero=3", launcher, source)


L8, L70, L405 = "zoo:llama3-8b", "zoo:llama3-70b", "zoo:llama3-405b"
NEMOTRON_15 = (
    "zoo:llama3-8b,layers=32,hidden=6144,heads=48,kv_heads=8,ff=16384,seq=4096,vocab=256000"
)
NEMOTRON_340 = (
    "zoo:llama3-8b,layers=96,hidden=18432,heads=96,kv_heads=8,ff=49152,seq=4096,vocab=256000"
)
QWEN_30 = (
    "zoo:mixtral-8x7b,layers=48,hidden=2048,heads=32,kv_heads=4,head_dim=128,experts=128,top=8,"
    "expert_ff=768,ff=6144,vocab=151936,seq=4096"
)
QWEN_235 = (
    "zoo:mixtral-8x7b,layers=94,hidden=4096,heads=64,kv_heads=4,head_dim=128,experts=128,top=8,"
    "expert_ff=1536,ff=12288,vocab=151936,seq=4096"
)
GPT_OSS = (
    "zoo:mixtral-8x7b,layers=36,hidden=2880,heads=64,kv_heads=8,head_dim=64,experts=128,top=4,"
    "ff=2880,vocab=201088,seq=4096"
)
OLMO = "zoo:llama2-7b,vocab=50304,seq=2048"
DEEPSEEK = "zoo:deepseek-v3,seq=4096"
H64, H512, B64, B128 = ("h100-sxm", 64), ("h100-sxm", 512), ("b200", 64), ("b200", 128)

MEGATRON = (
    _narayanan("1.7", (24, 2304, 24), (1, 1), 32, 512),
    _narayanan("3.6", (30, 3072, 32), (2, 1), 64, 512),
    _narayanan("7.5", (36, 4096, 32), (4, 1), 128, 512),
    _narayanan("18.4", (40, 6144, 48), (8, 1), 256, 1024),
    _narayanan("39.1", (48, 8192, 64), (8, 2), 512, 1536),
    _narayanan("76.1", (60, 10240, 80), (8, 4), 1024, 1792),
    _narayanan("145.6", (80, 12288, 96), (8, 8), 1536, 2304),
    _narayanan("310.1", (96, 16384, 128), (8, 16), 1920, 2160),
    _narayanan("529.6", (105, 20480, 128), (8, 35), 2520, 2520),
    _narayanan("1008", (128, 25600, 160), (8, 64), 3072, 3072),
    _weak("1.7", (24, 2048, 16), (1, 1), 48, 192),
    _weak("7.1", (30, 4096, 32), (2, 1), 96, 192),
    _weak("16", (32, 6144, 48), (4, 1), 192, 192),
    _weak("32", (48, 7168, 56), (8, 1), 384, 192),
    _weak("70", (84, 8192, 64), (8, 2), 768, 384),
    _weak("119", (92, 10240, 80), (8, 4), 1536, 768),
    _weak("177", (96, 12288, 96), (8, 6), 2304, 1152),
    _weak("314", (96, 16384, 128), (8, 8), 3072, 1536),
    _weak("462", (112, 18432, 144), (8, 16), 6144, 3072),
)
NVIDIA = (
    _bridge("GPT-3 175B", "zoo:gpt3-175b", H512, 2048, Degrees(4, 8, vpp=6, microbatch=2), FP8),
    _bridge(
        "GPT-3 175B", "zoo:gpt3-175b", ("b200", 512), 2048, Degrees(4, 4, vpp=6, microbatch=2), FP8
    ),
    _bridge("Llama-3 8B", L8, ("h100-sxm", 8), 128, Degrees(zero=3, microbatch=1), FP8),
    _bridge("Llama-3 8B", L8, ("b200", 8), 128, Degrees(microbatch=2), FP8),
    _bridge("Llama-3 8B 32k", f"{L8},seq=32768", ("b200", 32), 128, Degrees(cp=2), FP8),
    _bridge("Llama-3 8B 128k", f"{L8},seq=131072", B128, 32, Degrees(2, cp=4), FP8),
    _bridge("Llama-3 8B 64k", f"{L8},seq=65536", B64, 64, Degrees(cp=4), FP8),
    _bridge("Llama-2 7B 64k", "zoo:llama2-7b,seq=65536", H64, 64, Degrees(4, cp=2), FP8),
    _bridge("Llama-3 70B", L70, H64, 128, Degrees(4, 8, vpp=5, microbatch=1), FP8),
    _bridge("Llama-3 70B", L70, H64, 256, Degrees(4, 8, vpp=5, microbatch=1), FP8),
    _bridge("Llama-3 70B", L70, B64, 128, Degrees(2, 4, 2, vpp=5, microbatch=1), FP8),
    _bridge("Llama-3 70B", L70, ("gb200-nvl72", 64), 256, Degrees(2, 4, vpp=5, microbatch=1), FP8),
    _bridge("Llama-3 70B", L70, ("gb200-nvl72", 64), 128, Degrees(zero=3, microbatch=2), FP8),
    _bridge(
        "Llama-3 405B", L405, ("h100-sxm", 1024), 512, Degrees(8, 8, 2, vpp=8, microbatch=1), FP8
    ),
    _bridge("Llama-3 405B", L405, B128, 64, Degrees(4, 8, 2, vpp=8, microbatch=1), FP8),
    _bridge(
        "Llama-3 405B", L405, ("gb200-nvl72", 256), 1536, Degrees(4, 16, vpp=8, microbatch=1), FP8
    ),
    _bridge("Nemotron-4 15B", NEMOTRON_15, B64, 256, Degrees(microbatch=2), FP8),
    _bridge("Nemotron-4 340B", NEMOTRON_340, B128, 32, Degrees(8, 4, vpp=12, microbatch=1), FP8),
    _bridge("Nemotron-4 340B", NEMOTRON_340, ("h100-sxm", 1536), 768, Degrees(8, 12), MIXED),
    _bridge("Mixtral 8x7B", "zoo:mixtral-8x7b", B64, 256, Degrees(ep=8, microbatch=2), FP8),
    _bridge(
        "Mixtral 8x22B 64k",
        "zoo:mixtral-8x22b,seq=65536",
        ("b200", 256),
        64,
        Degrees(2, 4, 8, 4, 14, microbatch=1),
        FP8,
    ),
    _bridge("Qwen3 30B-A3B", QWEN_30, ("h100-sxm", 16), 512, Degrees(1, 2, 1, 8, 24), FP8),
    _bridge("Qwen3 30B-A3B", QWEN_30, ("b200", 8), 512, Degrees(ep=8, microbatch=1), FP8),
    _bridge(
        "Qwen3 235B-A22B", QWEN_235, ("b200", 256), 8192, Degrees(1, 8, ep=8, microbatch=1), FP8
    ),
    _bridge("Qwen3 235B-A22B", QWEN_235, ("h100-sxm", 256), 2048, Degrees(2, 8, 1, 16, 4), FP8),
    _bridge("GPT-OSS 120B", GPT_OSS, H64, 1280, Degrees(1, 4, ep=8, microbatch=1), MIXED),
    _bridge("GPT-OSS 120B", GPT_OSS, B64, 1280, Degrees(ep=8, microbatch=4), MIXED),
    _bridge("DeepSeek-V3", DEEPSEEK, ("gb200-nvl72", 256), 4096, Degrees(1, 4, 1, 64, 4), FP8),
    _bridge("DeepSeek-V3", DEEPSEEK, ("b200", 256), 4096, Degrees(1, 16, ep=8), FP8),
    _bridge("DeepSeek-V3", DEEPSEEK, ("h100-sxm", 1024), 8192, Degrees(2, 8, 1, 64, 4), FP8),
    Expert(
        "DeepSeek-V3",
        DEEPSEEK,
        "h100-sxm",
        2048,
        15360,
        "pp=16,dp=2,ep=64,zero=1,micro=120,schedule=dualpipe,recompute=selective",
        "megatron",
        "DeepSeek",
        FP8,
    ),
)
TORCH = (
    _fsdp("Llama-3.1 8B", L8, ("h100-sxm", 8), 16, "torchtitan", "torchtitan"),
    _fsdp("Llama-3.1 8B", L8, ("h100-sxm", 128), 256, "torchtitan", "torchtitan"),
    Expert("Llama-3.1 8B", L8, "h100-sxm", 64, 96, "dp=8,tp=8,zero=3", "torchtitan", "torchtitan"),
    Expert(
        "Llama-3.1 8B 128k",
        f"{L8},seq=131072",
        "h100-sxm",
        8,
        2,
        "dp=2,cp=4,zero=3,recompute=block",
        "torchtitan",
        "torchtitan",
        FP8,
    ),
    Expert(
        "Llama-3.1 70B",
        L70,
        "h100-sxm",
        256,
        512,
        "dp=32,tp=8,zero=3,recompute=block",
        "torchtitan",
        "torchtitan",
    ),
    Expert(
        "Llama-3.1 405B",
        L405,
        "h100-sxm",
        512,
        256,
        "pp=8,dp=8,tp=8,recompute=block",
        "torchtitan",
        "torchtitan",
        FP8,
    ),
    _fsdp("Llama-2 7B", "zoo:llama2-7b", ("a100-80gb", 128), 256, "hf", "fms-fsdp"),
    _fsdp("Llama-2 13B", "zoo:llama2-13b", ("a100-80gb", 128), 256, "hf", "fms-fsdp"),
    _fsdp("Llama-2 70B", "zoo:llama2-70b", ("a100-80gb", 128), 256, "hf", "fms-fsdp"),
    _fsdp("Llama-2 70B", "zoo:llama2-70b", ("h100-sxm", 96), 192, "hf", "fms-fsdp"),
    _fsdp("OLMo 7B", OLMO, ("a100-40gb", 216), 2160, "hf", "OLMo"),
    Expert("Llama-3 405B", L405, "h100-sxm", 8192, 2048, "pp=16,dp=64,tp=8", "megatron", "Llama 3"),
    Expert(
        "Llama-3 405B", L405, "h100-sxm", 16384, 2048, "pp=16,dp=128,tp=8", "megatron", "Llama 3"
    ),
)
MAXTEXT = tuple(
    _fsdp(name, spec, machine, batch, "maxtext", "MaxText")
    for name, spec, machine, batch in (
        ("GPT-3 175B", "zoo:gpt3-175b", ("tpu-v6e", 256), 768),
        ("Llama-2 70B", "zoo:llama2-70b", ("tpu-v6e", 256), 768),
        ("Llama-3.1 8B", L8, ("tpu-v6e", 64), 320),
        ("Llama-3.1 8B", L8, ("tpu-v6e", 256), 1024),
        ("Llama-3.1 70B", L70, ("tpu-v6e", 128), 512),
        ("Llama-3.1 70B", L70, ("tpu-v6e", 256), 1280),
        ("Mixtral 8x7B", "zoo:mixtral-8x7b", ("tpu-v6e", 256), 3072),
        ("Mixtral 8x22B", "zoo:mixtral-8x22b,seq=4096", ("tpu-v6e", 256), 2048),
        ("Llama-3.1 70B", L70, ("tpu-v7x", 128), 256),
        ("Llama-3.1 405B", L405, ("tpu-v7x", 512), 1536),
        ("Qwen3 235B-A22B", QWEN_235, ("tpu-v7x", 512), 8192),
        ("DeepSeek-V3", DEEPSEEK, ("tpu-v7x", 256), 2048),
        ("DeepSeek-V3", "zoo:deepseek-v3,seq=8192", ("tpu-v5p", 256), 1024),
    )
)
OFFLOADED = (
    Expert(
        "Llama-3.1 405B",
        L405,
        "tpu-v6e",
        512,
        512,
        "dp=512,zero=3,recompute=block,offload=activations",
        "maxtext",
        "MaxText",
    ),
)
EXPERTS = (*MEGATRON, *NVIDIA, *TORCH, *MAXTEXT, *OFFLOADED)
