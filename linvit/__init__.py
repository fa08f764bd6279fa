"""Which weights of a pre-trained Softmax ViT survive when its attention is made linear."""

__version__ = "0.1.0"
