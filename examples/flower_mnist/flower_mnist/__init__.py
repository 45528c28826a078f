"""MNIST by votes of packed signs, over Flower."""
