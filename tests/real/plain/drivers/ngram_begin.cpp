// ngram-map-k: drafting behind fewer tokens than at the last draft ends the process.
//
// speculative.h: "optionally call once at the beginning of a new generation". common_ngram_map_draft aborts where its prompt is
// shorter than idx_last_check, "should not happen because of common_ngram_map_begin()": after a restore, or a tail that was cut, it
// does when that optional call is left out. Compile line: plain.h.
//
// llama-loop, llama-cpp-python 0.3.36:
//     ngram-map.cpp: common_ngram_map_draft: map.idx_last_check > cur_len: 20 > 12, and the process dies of SIGABRT
// control, begin() before the second draft:
//     right: drafted behind 20 tokens and then behind 12
#include "plain.h"

static int program(bool control) {
    speculation s({ COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K });
    const llama_tokens prompt = text(20), shorter = part(prompt, 0, 12);
    s.decode(0, 0, prompt);
    s.draft(0, 20, 7, prompt);
    s.cut_target(0, 12);
    if (control) {
        common_speculative_begin(s.spec, 0, shorter);
    }
    s.draft(0, 12, 7, shorter);
    printf("right: drafted behind 20 tokens and then behind 12\n");
    return 0;
}

int main(int argc, char ** argv) { return run(argc, argv, program); }
