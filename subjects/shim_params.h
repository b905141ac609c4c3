// How a context's parameters cross the flat interface: thirteen integers, in the order of subjects.shim.params_array.
// Shared by everything of ours that makes contexts, so that they are made in one way.
#pragma once

#include "llama.h"

#include <cstdint>

static const int RD_N_PARAMS = 13;

// in: n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, kv_unified, type_k, type_v, flash_attn, swa_full, offload_kqv, n_threads,
//     embeddings
static inline llama_context_params rd_context_params(const int32_t * in, ggml_abort_callback on_abort) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = in[0];
    p.n_batch         = in[1];
    p.n_ubatch        = in[2];
    p.n_seq_max       = in[3];
    p.n_rs_seq        = in[4];
    p.kv_unified      = in[5] != 0;
    p.type_k          = (ggml_type) in[6];
    p.type_v          = (ggml_type) in[7];
    p.flash_attn_type = in[8] ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.swa_full        = in[9]  != 0;
    p.offload_kqv     = in[10] != 0;
    p.op_offload      = in[10] != 0;
    p.n_threads       = in[11];
    p.n_threads_batch = in[11];
    p.embeddings      = in[12] != 0;
    p.no_perf         = true;
    p.abort_callback  = on_abort;
    return p;
}
