// Lines over the last five minutes, one point a second, kept in this page only.

import { find, setText } from "./dom.js";
import { number } from "./words.js";

const WIDTH = 600;
const HEIGHT = 120;
const LASTS_S = 300;
const SVG = "http://www.w3.org/2000/svg";

class Chart {
  #id;
  #name;
  #lines;

  constructor(id, name, classes) {
    this.#id = id;
    this.#name = name;
    this.#lines = classes.map((className) => {
      const line = document.createElementNS(SVG, "polyline");
      line.setAttribute("class", className);
      find(id).append(line);
      return line;
    });
  }

  draw(points, now) {
    const values = points.flatMap((point) => point.values).filter((value) => value !== null);
    const top = Math.max(1, ...values);
    this.#lines.forEach((line, index) => {
      const drawn = points
        .filter((point) => point.values[index] !== null)
        .map((point) => {
          const x = WIDTH - ((now - point.at) / 1000 / LASTS_S) * WIDTH;
          return `${x.toFixed(1)},${(HEIGHT - (point.values[index] / top) * (HEIGHT - 6)).toFixed(1)}`;
        });
      line.setAttribute("points", drawn.join(" "));
    });
    const last = points.at(-1)?.values ?? [];
    find(this.#id).setAttribute("aria-label", `${this.#name}: now ${last.map((value) => number(value)).join(", ")}, at most ${number(top)}`);
    setText(find(`${this.#id}-top`), `top: ${number(top)}`);
  }
}

export class Charts {
  #points = [];
  #freeness = new Chart("chart-freeness", "Cluster freeness in decode steps, mean and least", ["mean", "least"]);
  #tokens = new Chart("chart-tokens", "Tokens a second through this gateway", ["mean"]);

  show(cluster, now) {
    const last = this.#points.at(-1);
    if (last !== undefined && now - last.at < 950) return;
    const { mean_steps: mean, least_steps: least } = cluster.freeness;
    this.#points.push({ at: now, values: [mean, least, cluster.measured.tokens_per_s] });
    while (now - this.#points[0].at > LASTS_S * 1000) this.#points.shift();
    this.#freeness.draw(this.#points.map((point) => ({ at: point.at, values: point.values.slice(0, 2) })), now);
    this.#tokens.draw(this.#points.map((point) => ({ at: point.at, values: point.values.slice(2) })), now);
  }
}
