"""Data that ships with the package: a subset of Fashion-MNIST and a Softmax ViT trained on the full set."""
