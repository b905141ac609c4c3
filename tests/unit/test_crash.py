"""Reading of stacks, and of logs in which several things are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.engine.process import Listener
from oracles.crash import FRAMES, condensed, function, read, stack, undefined
from oracles.names import plain
from subjects.trace import End

DATA = Path(__file__).resolve().parents[1] / "golden" / "data" / "crash"
ASSERT = "/b/llama.cpp/src/llama-kv-cache.cpp:12: GGML_ASSERT(fits) failed\n"
OVERFLOW = "/b/llama.cpp/src/llama-kv-cells.h:4:8: runtime error: signed integer overflow: -1 + 0x7f cannot be\n"


def log(name: str) -> str:
    return (DATA / f"{name}.txt").read_text().partition("\n\n")[2]


@pytest.mark.parametrize(
    ("frame", "name"),
    [
        (
            "llama_kv_cache::state_read(llama_io_read_i&, int) /b/src/llama-kv-cache.cpp:12:3",
            "llama_kv_cache::state_read",
        ),
        ("llama_decode /b/src/llama-context.cpp:4404:26", "llama_decode"),
        ("ggml_abort (/b/libggml-base.so+0x12)", "ggml_abort"),
        ("std::vector<int, std::allocator<int>>::at(unsigned long) /usr/v.h:3", "std::vector::at"),
        ("void f<llama_cell>(llama_cell const&) /b/src/llama-x.h:1:2", "f"),
        ("(anonymous namespace)::reader::read(void*) const /b/src/llama-io.cpp:3", "reader::read"),
        ("llama_x::operator()(int) const src/llama-io.cpp:3", "llama_x::operator()"),
        ("f(int)::$_0::operator()(int) const /b/src/llama-io.cpp:3", "f::$_0::operator()"),
        ("llama_kv_cells::operator<(int) const /b/src/llama-kv-cells.h:3:1", "llama_kv_cells::operator<"),
        ("bool operator==<int>(x<int> const&) (.cold) src/llama-io.cpp:3:1", "operator=="),
        ("operator new(unsigned long) /c/asan_new_delete.cpp:95:3", "operator new"),
        ("llama_p::get(a->b) /some one/src/llama-x.cpp:9:1", "llama_p::get"),
        (" (/lib/libc.so.6+0x3c04f) (BuildId: 93ac)", ""),
        ("", ""),
        (")>]", ""),
    ],
)
def test_functions(frame: str, name: str) -> None:
    assert function(frame) == name


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("llama_kv_cache::seq_rm(int, int, int)", "llama_kv_cache::seq_rm"),
        ("llama_kv_cells::seq_has(unsigned int, int) const", "llama_kv_cells::seq_has"),
        ("void copy<float>(std::vector<int, std::allocator<int> > const&)", "copy"),
        ("std::map<int, x>& f::g[abi:cxx11](int (*)(int)) const", "f::g"),
        ("(anonymous namespace)::kpool_pad(unsigned int)", "{anonymous}::kpool_pad"),
        ("llama_io_write_host::~llama_io_write_host()", "llama_io_write_host::~llama_io_write_host"),
        ("llama_state_get_size", "llama_state_get_size"),
        ("x::operator<(int) const &", "x::operator<"),
        ("x::operator<< <int>(int)", "x::operator<<"),
        ("y* x::operator->()", "x::operator->"),
        ("x::operator[](unsigned long)", "x::operator[]"),
        ("x::operator()(int) const", "x::operator()"),
        ("x::operator bool() const", "x::operator bool"),
        ("operator delete[](void*)", "operator delete"),
        ("bool cells::has(int) const::$_0::operator()(int) const", "cells::has::$_0::operator()"),
        ("toy(int, int)::{lambda(int)#1}::operator()(int) const", "toy::{lambda#1}::operator()"),
    ],
)
def test_names(demangled: str, name: str) -> None:
    assert plain(demangled) == name


def test_the_first_frames_of_llama_cpp_in_the_first_stack() -> None:
    found = stack(log("libfuzzer-assert").splitlines())
    assert found == ("llama_batch_allocr::split_equal", "llama_memory_hybrid::init_batch", "llama_context::decode")
    assert len(found) == FRAMES
    # frames of libstdc++ are skipped, where the memory was freed is another stack
    assert stack(log("libfuzzer-asan-use-after-free").splitlines()) == (
        "llama_context::state_seq_write_data",
        "llama_context::state_seq_get_size",
    )
    assert stack(log("libfuzzer-timeout").splitlines()) == ()
    assert stack([]) == ()


@pytest.mark.parametrize("name", [p.stem for p in sorted(DATA.glob("libfuzzer-*.txt"))])
def test_a_condensed_log_is_the_same_crash(name: str) -> None:
    text = log(name)
    short = "\n".join(condensed(text))
    assert len(short) <= len(text)
    assert read(End("exit", 77), short) == read(End("exit", 77), text)


def test_what_ended_it_counts_not_what_was_said_while_it_went_on() -> None:
    assert read(End("signal", 6), OVERFLOW + ASSERT).text == "llama-kv-cache.cpp: GGML_ASSERT(fits) failed"
    assert read(End("exit", 1), OVERFLOW + log("libfuzzer-asan-segv")).kind == "address"
    thrown = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no\n"
    assert read(End("signal", 6), OVERFLOW + thrown).text == "uncaught std::runtime_error: no"
    assert read(End("signal", 6), OVERFLOW).kind == "undefined"
    assert read(End("hang"), OVERFLOW + ASSERT).text == "hang"


def test_where_what_was_broken_is_declared_is_no_assertion() -> None:
    said = (
        "/b/src/llama-context.cpp:2759:21: runtime error: null pointer passed as argument 1, never null\n"
        "/usr/include/string.h:44:28: note: nonnull attribute specified here\n"
        "    #0 0x7f in llama_io_read_host::read(void*, unsigned long) /b/src/llama-context.cpp:2759:9\n"
    )
    assert read(End("signal", 6), said + ASSERT).text == "llama-kv-cache.cpp: GGML_ASSERT(fits) failed"
    (found,) = undefined(said)
    assert found.frames == ("llama_io_read_host::read",)
    heard = Listener(lambda _: None)
    heard.take((said + ASSERT).encode())
    assert ["\n".join(lines) + "\n" for lines in heard.undefined] == [said]


def test_undefined_behaviour_is_told_of_by_place_without_its_numbers() -> None:
    again = OVERFLOW.replace(":4:8", ":5:9").replace("-1", "77")
    (found,) = undefined(OVERFLOW + "    #0 0x1 in llama_kv_cells::pos_add(int) /b/src/llama-kv-cells.h:4:8\n" + again)
    assert found.text == "llama-kv-cells.h: runtime error: signed integer overflow: N + N cannot be"
    assert found.frames == ("llama_kv_cells::pos_add",)
    assert undefined(ASSERT) == []


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (ASSERT.replace("GGML_ASSERT(fits) failed", "n = 7"), "llama-kv-cache.cpp: n = N"),
        ("libc++abi: terminating due to uncaught exception of type std::bad_cast: x", "uncaught std::bad_cast: x"),
        ("libc++abi: terminating with uncaught exception of type int", "uncaught int: "),
        ("==7==ERROR: AddressSanitizer: allocation-size-too-big: requested", "out of memory"),
        ("==7==ERROR: AddressSanitizer: requested allocation size 0xffff exceeds maximum", "out of memory"),
        ("==7==ERROR: AddressSanitizer: out of memory: allocator is trying to allocate 0x8 bytes", "out of memory"),
        ("==7==WARNING: AddressSanitizer failed to allocate 0xffff bytes", "exit 1"),
        ("==7==ERROR: AddressSanitizer: attempting double-free on 0x6 in thread T0:", "double-free"),
        ("AddressSanitizer: CHECK failed: asan_x.cpp:335 \"((__x)) != (0)\"", "sanitizer: CHECK failed: asan_x.cpp"),
        ("==7== ERROR: libFuzzer: fuzz target exited", "the fuzz target exited"),
        ("==7== ERROR: libFuzzer: deadly signal", "deadly signal"),
        ("==7== ERROR: libFuzzer: out-of-memory (used: 716Mb; limit: 700Mb)", "out of memory"),
        ("==7== ERROR: libFuzzer: timeout after 4 seconds", "hang"),
    ],
)  # fmt: skip
def test_lines(said: str, text: str) -> None:
    assert read(End("exit", 1), said).text == text
