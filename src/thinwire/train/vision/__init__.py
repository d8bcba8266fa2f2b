"""Convolutional networks on images: the task, its models, and the files that it reads."""
