"""Read ONNX files, and run their operators in PyTorch, so that they are captured like any other module.

Invariant: a file is data: nothing in it runs, and no file outside its folder is read.
"""
