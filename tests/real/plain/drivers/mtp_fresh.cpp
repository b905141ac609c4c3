// draft-mtp: a new prompt in an emptied sequence starts from the hidden row of the conversation before.
//
// Nothing resets common_speculative_impl_draft_mtp::pending_h: begin() only warns, and removing the sequence from both
// memories does not reach the driver. A fresh driver pairs the first token of a prompt with a row of zeros. Compile line: plain.h.
//
// qwen35, llama-cpp-python 0.3.36:
//     WRONG: drafted [10 53 7] after another conversation, [10 53 7] without; max abs error of the draft logits 1.4
// control, the new prompt in a sequence that was never used:
//     right: drafted [10 53 7] after another conversation, [10 53 7] without; max abs error of the draft logits 0
#include "plain.h"

static int program(bool control) {
    const llama_tokens prompt = text(4);
    std::vector<float> target;
    drafted clean;
    {
        speculation fresh({ COMMON_SPECULATIVE_TYPE_DRAFT_MTP });
        target = fresh.decode(0, 0, prompt);
        common_speculative_begin(fresh.spec, 0, prompt);
        clean = fresh.draft(0, 4, 7);
    }
    speculation s({ COMMON_SPECULATIVE_TYPE_DRAFT_MTP });
    s.decode(0, 0, text(9, 1));
    llama_memory_seq_rm(llama_get_memory(s.tgt), 0, -1, -1);
    llama_memory_seq_rm(llama_get_memory(s.dft), 0, -1, -1);
    const llama_seq_id seq = control ? 1 : 0;
    must_agree(s.decode(seq, 0, prompt), target);
    common_speculative_begin(s.spec, seq, prompt);
    return judge("after another conversation", s.draft(seq, 4, 7), "without", clean);
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
