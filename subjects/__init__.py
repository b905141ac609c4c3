"""Subjects: the llama.cpp builds under test and the small models they run."""
