"""Ways in: HTTP and gRPC. Doors read and write wire formats; they decide nothing about lanes."""
