// The server's load: running and waiting requests, KV cache, tokens a second, acceptance.

import { AcceptanceBars, Sparkline } from "./chart.js";
import { byId, fill } from "./dom.js";
import { get } from "./stream.js";

const INTERVAL_MS = 2000;

/** Polls `/v1/load` while the page is visible. */
export class LoadView {
  /** @param {(isThere: boolean) => void} onReach called when the server no longer answers, and when it does again */
  constructor(onReach) {
    this.onReach = onReach;
    this.isThere = true;
    const percent = (/** @type {number} */ value) => `${(100 * value).toFixed(0)} %`;
    this.running = new Sparkline("Running", (value) => String(value));
    this.waiting = new Sparkline("Waiting", (value) => String(value));
    this.cache = new Sparkline("KV cache", percent, 1);
    this.hits = new Sparkline("Prefix hits", percent, 1);
    this.rate = new Sparkline("Tokens a second", (value) => value.toFixed(0));
    this.acceptance = new AcceptanceBars("Drafts accepted");
    /** @type {{tokens: number, at: number} | null} */
    this.before = null;
    const all = [this.running, this.waiting, this.rate, this.cache, this.hits, this.acceptance];
    fill(byId("load"), all.map((each) => each.element));
    this.poll();
    setInterval(() => this.poll(), INTERVAL_MS);
  }

  async poll() {
    if (document.hidden) return;
    try {
      const load = await get("v1/load");
      this.reach(true);
      this.show(load);
    } catch (error) {
      this.before = null; // the charts pause
      this.reach(!(error instanceof TypeError));
    }
  }

  /** @private @param {boolean} isThere whether the server has answered, be it with a refusal */
  reach(isThere) {
    if (isThere === this.isThere) return;
    this.isThere = isThere;
    this.onReach(isThere);
  }

  /** @private @param {any} load */
  show(load) {
    this.running.push(load.running ?? 0);
    this.waiting.push(load.waiting ?? 0);
    this.cache.push(load.kv_cache_usage ?? 0);
    this.hits.push(load.prefix_cache_hit_rate ?? 0);
    const now = { tokens: load.num_generated_tokens ?? 0, at: performance.now() };
    if (this.before) this.rate.push(Math.max(0, (1000 * (now.tokens - this.before.tokens)) / (now.at - this.before.at)));
    this.before = now;
    const { drafted = 0, accepted = 0, accepted_by_position: byPosition = [] } = load;
    const words = drafted ? `${accepted.toLocaleString("en")} of ${drafted.toLocaleString("en")}` : "none drafted";
    this.acceptance.show(byPosition, load.steps ?? 0, words);
  }
}
