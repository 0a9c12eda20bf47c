"""Lists all architectures that the decoder serves. docs/how-to-add-a-family.md says how to add one."""

from __future__ import annotations

from lorafleet.workers.bases.families.cohere import COHERE, COHERE2
from lorafleet.workers.bases.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2
from lorafleet.workers.bases.families.ernie import ERNIE_MOE
from lorafleet.workers.bases.families.exaone import EXAONE4
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_OF_PICTURES
from lorafleet.workers.bases.families.gemma3n import GEMMA3N, GEMMA3N_OF_PICTURES
from lorafleet.workers.bases.families.gemma4 import (
    GEMMA4,
    GEMMA4_OF_PICTURES,
    GEMMA4_UNIFIED,
    GEMMA4_UNIFIED_OF_PICTURES,
)
from lorafleet.workers.bases.families.glm import GLM, GLM4, GLM4_MOE
from lorafleet.workers.bases.families.gpt_oss import GPT_OSS
from lorafleet.workers.bases.families.granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED
from lorafleet.workers.bases.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from lorafleet.workers.bases.families.llama import APERTUS, ARCEE, HELIUM, INTERNLM3, LLAMA, SEED_OSS
from lorafleet.workers.bases.families.llama4 import LLAMA4, LLAMA4_OF_PICTURES
from lorafleet.workers.bases.families.minimax import MINIMAX_M2
from lorafleet.workers.bases.families.ministral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3
from lorafleet.workers.bases.families.mixtures import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from lorafleet.workers.bases.families.nemotron import NEMOTRON
from lorafleet.workers.bases.families.olmo import OLMO, OLMO2, OLMO3
from lorafleet.workers.bases.families.phi import PHI, PHI3, PHIMOE
from lorafleet.workers.bases.families.qwen import QWEN2, QWEN2_5_VL, QWEN2_VL, QWEN3, QWEN3_VL
from lorafleet.workers.bases.families.recurrent.bamba import BAMBA, FALCON_H1
from lorafleet.workers.bases.families.recurrent.lfm2 import LFM2, LFM2_MOE
from lorafleet.workers.bases.families.recurrent.nemotron_h import NEMOTRON_H
from lorafleet.workers.bases.families.recurrent.olmo_hybrid import OLMO_HYBRID
from lorafleet.workers.bases.families.recurrent.qwen_recurrent import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_OF_PICTURES,
    QWEN3_5_OF_PICTURES,
    QWEN3_NEXT,
)
from lorafleet.workers.bases.families.smollm import SMOLLM3
from lorafleet.workers.bases.families.stablelm import STABLELM
from lorafleet.workers.bases.families.starcoder import STARCODER2

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        MISTRAL3,
        MINISTRAL,
        MINISTRAL3,
        SMOLLM3,
        SEED_OSS,
        ARCEE,
        APERTUS,
        HELIUM,
        INTERNLM3,
        NEMOTRON,
        STABLELM,
        QWEN2,
        QWEN3,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3_OF_PICTURES,
        GEMMA3N,
        GEMMA3N_OF_PICTURES,
        GEMMA4,
        GEMMA4_OF_PICTURES,
        GEMMA4_UNIFIED,
        GEMMA4_UNIFIED_OF_PICTURES,
        PHI,
        PHI3,
        PHIMOE,
        OLMO,
        OLMO2,
        OLMO3,
        EXAONE4,
        GRANITE,
        GRANITE4,
        STARCODER2,
        COHERE,
        COHERE2,
        MIXTRAL,
        QWEN3_MOE,
        QWEN2_MOE,
        OLMOE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        GPT_OSS,
        GLM,
        GLM4,
        GLM4_MOE,
        LLAMA4,
        LLAMA4_OF_PICTURES,
        ERNIE_MOE,
        HUNYUAN,
        HUNYUAN_MOE,
        MINIMAX_M2,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        GLM4_MOE_LITE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_OF_PICTURES,
        QWEN3_5_MOE,
        QWEN3_5_MOE_OF_PICTURES,
        NEMOTRON_H,
        BAMBA,
        FALCON_H1,
        LFM2,
        LFM2_MOE,
        OLMO_HYBRID,
    )
}
