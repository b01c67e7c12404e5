"""Models and layouts by name: the paper's, with what it does not say filled in and marked as such.

    PRESETS["175b"] -> Preset     every field with the source of its value

Figures 10 and 15 are of the four small models, Figure 16 of the large ones. The paper takes iteration and gap times of
the large ones from Calculon and prints neither; here they follow from FLOPs, the GPU's peak and a utilisation (MFU),
which are inputs. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowcheck.plan.jobs.followed import Layout

__all__ = ["LARGE", "PRESETS", "SMALL", "Preset", "flops_seconds"]

GPT = "Narayanan et al., SC'21, table 1"
A100 = "NVIDIA A100 data sheet, dense bf16"
LLAMA = "Llama 3, 2024, table 4"
TABLE_2 = "FlowCheck, Table 2: 8 x 12 x 16, 96 groups"
ASSUMED = "assumed: the paper does not say"


@dataclass(frozen=True)
class Preset:
    """A job. tp, pp, dp: tensor-, pipeline- and data-parallel ranks. tokens: of an iteration. peak_tflops: of a GPU.
    mfu: share of it that the job reaches. port_gbps: of each GPU's NIC. dtype: of the gradients on the wire. protocol:
    NCCL's. layout: what reduces them. sources: of the fields that no one states in one place."""

    title: str
    parameters: float
    tp: int
    pp: int
    dp: int
    tokens: float
    peak_tflops: float
    mfu: float
    port_gbps: float
    dtype: str
    protocol: str
    layout: Layout
    sources: Mapping[str, str]

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def source(self, field: str) -> str:
        return f"{self.title}: {self.sources.get(field, ASSUMED)}"


def _small(title: str, parameters: float, tokens: float, where: str, batch: str) -> Preset:
    sources = {
        "parameters": where, "dp": "FlowCheck, equation (2)'s example: 8", "tokens": batch, "peak-tflops": A100,
        "port-gbps": "FlowCheck, section 9: 400", "protocol": "FlowCheck reads LL",
        "dtype": "DDP's without a communication hook",
    }
    sources["layout"] = "FlowCheck's evaluation: data parallelism alone"
    return Preset(title, parameters, 1, 1, 8, tokens, 312, 0.4, 400, "float32", "ll", "ddp", sources)


def _large(
    title: str, parameters: float, layout: tuple[int, int, int], tokens: float, mfu: float, where: Mapping[str, str],
    peak: float = 312, port: float = 200,
) -> Preset:
    fp32 = "Megatron-LM accumulates and reduces in float32"
    base = {
        "parameters": "FlowCheck, section 8.5", "peak-tflops": A100, "dtype": fp32,
        "protocol": "NCCL's for large calls, nccl-wire 3.4", "layout": "Megatron-LM's three kinds of parallelism",
    }
    return Preset(
        title, parameters, *layout, tokens, peak, mfu, port, "float32", "simple", "megatron", {**base, **where}
    )


PRESETS = {
    "bert": _small(
        "BERT, 110M", 110e6, 256 * 512, "Devlin et al., 2019, base", "Devlin et al., 2019: 256 sequences of 512"
    ),
    "roberta": _small(
        "RoBERTa, 330M", 330e6, 8192 * 512, "FlowCheck's evaluation", "Liu et al., 2019: 8192 sequences of 512"
    ),
    "gpt3-1.3b": _small(
        "GPT-3, 1.3B", 1.3e9, 1e6, "Brown et al., 2020, table 2.1", "Brown et al., 2020, table 2.1: 1 million"
    ),
    "llama2-7b": _small(
        "Llama2-7B", 7e9, 4e6, "Touvron et al., 2023", "Touvron et al., 2023: 4 million"
    ),
    "175b": _large(
        "175B on 1536 GPUs", 175e9, (8, 12, 16), 1536 * 2048, 0.47,
        {"tp": TABLE_2, "pp": TABLE_2, "dp": TABLE_2, "tokens": "Brown et al., 2020: 3.2 million",
         "mfu": f"{GPT}, its 145.6B: 148 of 312"},
    ),
    "530b": _large(
        "530B on 2240 GPUs", 530e9, (8, 35, 8), 2240 * 2048, 0.54,
        {"tp": "Korthikanti et al., 2022, table 3", "pp": "Korthikanti et al., 2022, table 3",
         "dp": "2240 / (tp x pp)", "tokens": "Korthikanti et al., 2022: batch 280 x 8",
         "mfu": "Korthikanti et al., 2022: 54.2 % on 2240"},
    ),
    "1t": _large(
        "1T on 3072 GPUs", 1008e9, (8, 64, 6), 3072 * 2048, 0.52,
        {"parameters": GPT, "tp": GPT, "pp": GPT, "dp": "3072 / (tp x pp)", "tokens": GPT,
         "mfu": f"{GPT}: 163 of 312"},
    ),
    "405b": _large(
        "405B on 16384 GPUs", 405e9, (8, 16, 128), 16e6, 0.41,
        {"parameters": LLAMA, "tp": LLAMA, "pp": LLAMA, "dp": LLAMA, "tokens": LLAMA, "mfu": LLAMA,
         "peak-tflops": "NVIDIA H100 data sheet, dense bf16",
         "port-gbps": "Llama 3, 2024, section 3.3: 400", "dtype": "Llama 3 reduce-scatters; here as if AllReduced"},
        peak=989, port=400,
    ),
}
SMALL = ("bert", "roberta", "gpt3-1.3b", "llama2-7b")
LARGE = ("175b", "530b", "1t", "405b")


def flops_seconds(parameters: float, tokens: float, gpus: int, peak_tflops: float, mfu: float) -> float:
    """Seconds of an iteration: 6 x parameters x tokens / (GPUs x peak x MFU).

    Source: Kaplan et al., 2020, section 2.1 (forward 2, backward 4 per parameter and token); attention is left out.
    """
    return 6 * parameters * tokens / (gpus * peak_tflops * 1e12 * mfu)
