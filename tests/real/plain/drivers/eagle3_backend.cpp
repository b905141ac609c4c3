// draft-eagle3: with backend sampling, two sequences that draft in one call get the tokens of the second.
//
// Backend sampling is the default. Two at a time is what a server with several busy slots does. Compile line: plain.h.
//
// The cause:
// - measured: after the call llama_get_sampled_logits_ith(dft, 0) has the ten best logits of sequence 0, but
//   llama_get_sampled_candidates_ith(dft, 0) the token ids of sequence 1. An eval callback shows both ggml_top_k results at one
//   address, although both are outputs of the graph, and that they had it in the graph before, of process(), as no outputs.
// - read: llm_graph_context::build_sampling builds the chains of all samplers into each graph, so that its shape does not depend
//   on who samples, but llm_graph_result::set_outputs marks only the results of sequences with an output row. process() asks for
//   no rows, so there the first result's place is free once it is used, and the second result gets it.
//   ggml_gallocr_needs_realloc compares numbers of nodes and leafs, and sizes, but not which tensors are outputs: the graph of
//   draft() has the same shape and no more rows, so it keeps that layout.
// - inferred: draft-mtp is right (measured: two addresses in all its graphs) as it stays with the layout that was reserved
//   with every sampler active. draft-eagle3 runs its encoder, another graph, in the same context, so each process() lays out anew.
// - measured: wrong without flash attention, and with it in a unified cache; right with flash attention and streams of their own,
//   where draft() moves all addresses. Right also with one more encoder graph between process() and draft(), after which draft()
//   has to lay out its own graph; the program does that, too. And right with an edited ggml-alloc.c whose
//   ggml_gallocr_needs_realloc always says true.
//
// qwen35 + eagle3-qwen35, llama-cpp-python 0.3.36:
//     WRONG: [25 0 25] [25 0 25] in one call, [38 1 8] [25 0 25] one at a time, [38 1 8] [25 0 25] with an encoder graph between
// control, sampled on the CPU:
//     right: [38 1 8] [25 0 25] in one call, [38 1 8] [25 0 25] one at a time, [38 1 8] [25 0 25] with an encoder graph between
#include "plain.h"

static const llama_tokens A = text(12, 2), B = text(9, 1);

static void encode(llama_context * ctx) {
    const size_t width = 3*llama_model_n_embd(g_target);
    const std::vector<float> zeros(width);
    const llama_pos pos = llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1; // not used, but looked at
    common_batch b(ctx);
    b.add_embd({ zeros.data(), 1, width }, &pos, 0, true);
    must(llama_process(ctx, LLAMA_PROCESS_TYPE_ENCODE, b.get()) == 0, "the encoder does not run");
}

// the drafts of both sequences, in one call or one at a time
static std::string drafts(bool backend_sampling, bool one_call, bool encoder_between = false) {
    options o = { COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 };
    o.backend_sampling = backend_sampling;
    speculation s(o);
    s.decode(0, 0, A);
    s.decode(1, 0, B);
    if (encoder_between) {
        encode(s.dft);
    }
    if (one_call) {
        const auto both = s.draft_all({ 0, 1 }, { 12, 9 }, { 7, 30 }, { A, B });
        return str(both[0].tokens) + " " + str(both[1].tokens);
    }
    const llama_tokens first = s.draft(0, 12, 7).tokens;
    return str(first) + " " + str(s.draft(1, 9, 30).tokens);
}

static int program(bool control) {
    const std::string want = drafts(true, false), got = drafts(!control, true), encoder = drafts(true, true, true);
    const bool wrong = got != want || encoder != want;
    printf("%s: %s in one call, %s one at a time, %s with an encoder graph between\n", wrong ? "WRONG" : "right",
        got.c_str(), want.c_str(), encoder.c_str());
    return wrong;
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
