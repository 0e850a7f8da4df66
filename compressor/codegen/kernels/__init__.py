"""One file per kernel family; each makes TIR functions for given shapes and one instruction set."""
