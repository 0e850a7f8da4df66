"""Read GGUF files (llama.cpp): header, blocks, and the models whose names are known.

Invariant: no byte is read beyond the file's end, whatever its header says.
"""
