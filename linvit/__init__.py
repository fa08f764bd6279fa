"""Which weights of a pre-trained Softmax ViT survive when its attention is made linear."""
