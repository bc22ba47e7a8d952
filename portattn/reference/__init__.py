"""The reference path in plain torch: blockwise attention, its gradients, and cache writes."""
