"""The README's example: from a Markov chain to a certified flow and its figure."""

from pathlib import Path

import gradflow


def main() -> None:
    chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], stickiness=0.5)
    model = gradflow.OneLayerTransformer(vocabulary=chain.size, width=10)
    problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))

    flow = gradflow.integrate(problem, problem.init(seed=0, scale=1e-3), t1=400.0)
    print(flow)

    figure = Path("out/quickstart.png")
    figure.parent.mkdir(exist_ok=True)
    gradflow.plotting.plot_overview(flow).savefig(figure, dpi=150)
    print(f"figure           {figure}")


if __name__ == "__main__":
    main()
