"""The flow's equation, integrated by diffrax in segments; knows no `Flow`."""
