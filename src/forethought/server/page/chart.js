// Two small charts: a value over the last minutes, and shares by position.

import { el, fill } from "./dom.js";

const NUM_SAMPLES = 120;

/** The last samples of a value as a line, with the newest in words. */
export class Sparkline {
  /** @param {string} title @param {(value: number) => string} format @param {number} [full] the top of the scale; 0: the largest sample */
  constructor(title, format, full = 0) {
    this.format = format;
    this.full = full;
    /** @type {number[]} */
    this.samples = [];
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.value = el("strong", {}, "–");
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), this.value), this.canvas);
  }

  /** @param {number} value */
  push(value) {
    this.samples.push(value);
    if (this.samples.length > NUM_SAMPLES) this.samples.shift();
    this.value.textContent = this.format(value);
    this.paint();
  }

  paint() {
    const { canvas, width, height, colours } = prepared(this.canvas);
    const top = this.full || Math.max(1e-9, ...this.samples);
    canvas.strokeStyle = colours.line;
    canvas.strokeRect(0, height - 0.5, width, 0);
    canvas.strokeStyle = colours.accent;
    canvas.lineWidth = 1.5;
    canvas.beginPath();
    this.samples.forEach((sample, i) => {
      const x = width - ((this.samples.length - 1 - i) * width) / (NUM_SAMPLES - 1);
      canvas.lineTo(x, height - 1.5 - (sample / top) * (height - 4));
    });
    canvas.stroke();
  }
}

/** The share of steps whose first, second, ... draft token was accepted. */
export class AcceptanceBars {
  /** @param {string} title */
  constructor(title) {
    this.bars = el("div", { class: "bars" });
    this.value = el("strong", {}, "–");
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), this.value), this.bars);
  }

  /**
   * @param {number[]} byPosition steps in which at least k + 1 draft tokens were accepted
   * @param {number} steps all steps; 0: the shares are of the first position
   * @param {string} words
   */
  show(byPosition, steps, words) {
    const whole = steps || byPosition[0] || 1;
    const shares = byPosition.slice(0, 12).map((count) => count / whole);
    this.value.textContent = words;
    fill(
      this.bars,
      shares.map((share, i) => {
        const bar = el("span", { class: "bar" });
        bar.style.height = `${Math.max(2, 100 * Math.min(1, share))}%`;
        return el("span", { class: "slot", title: `position ${i + 1}: ${(100 * share).toFixed(0)} %` }, bar);
      }),
    );
    const told = shares.map((share, i) => `${i + 1}: ${(100 * share).toFixed(0)} %`).join(", ");
    this.bars.setAttribute("role", "img");
    this.bars.setAttribute("aria-label", told ? `Accepted by position: ${told}` : "No drafts yet");
  }
}

/** @param {HTMLCanvasElement} element */
function prepared(element) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const [width, height] = [element.clientWidth || 150, element.clientHeight || 32];
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  const canvas = /** @type {CanvasRenderingContext2D} */ (element.getContext("2d"));
  canvas.setTransform(ratio, 0, 0, ratio, 0, 0);
  const style = getComputedStyle(element);
  const colours = { line: style.getPropertyValue("--line"), accent: style.getPropertyValue("--accent") };
  return { canvas, width, height, colours };
}
