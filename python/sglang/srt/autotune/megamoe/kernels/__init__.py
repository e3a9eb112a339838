"""What a MegaMoE kernel is (`base`) and the kernels that exist: FlashInfer's, and one in plain torch."""
