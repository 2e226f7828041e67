// Three pictures that a reader can change: DP-REC's odds, I-MVU's coin and bell, and a game against randomised response.
// <figure><figcaption>what it says at first</figcaption><script src="sliders.js" data-draw="odds"></script></figure>
(function (script) {
  const box = script.parentElement, caption = box.querySelector("figcaption");
  const bar = document.createElement("p"), values = {}, paths = {};
  const node = (name, given, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in given) made.setAttribute(key, given[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const normal = (x) => Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI);
  const line = (xs, ys) => "M" + xs.map((x, i) => x.toFixed(1) + " " + ys[i].toFixed(1)).join("L");
  const range = (n, f) => Array.from({length: n}, (_, i) => f(i));
  const set = (name, path) => paths[name].setAttribute("d", path);
  const ticks = (xs, across) => xs.map((x) => [across(x), 243, "middle", String(x)]);

  function quantile(p) {
    let low = -9, high = 9;
    const below = (x) => {
      let term = x, sum = x;
      for (let i = 1; i < 200; i++) { term *= x * x / (2 * i + 1); sum += term; }
      return 0.5 + sum * normal(x);
    };
    for (let i = 0; i < 60; i++) {
      const x = (low + high) / 2;
      if (below(x) < p) low = x; else high = x;
    }
    return (low + high) / 2;
  }

  const odds = () => {
    const across = (x) => 320 + 70 * x, up = (y) => 220 - 340 * y, grid = range(181, (i) => -4.5 + i / 20);
    return {
      sliders: [["s", "length of the update, s =", 0, 3, 0.25, 1.5], ["bits", "bits of an index", 1, 7, 1, 4]],
      curves: {prior: [1, "2 4"], target: [1.5, ""], stems: [3, ""]},
      axis: "M5 220H635",
      labels: [...ticks([-4, -2, 0, 2, 4], across), [320, 275, "middle", "candidate"],
        [20, 20, "start", "dotted: prior; line: target; stems: what is picked"]],
      draw: (v) => {
        const K = 2 ** v.bits, z = range(K, (k) => quantile((k + 0.5) / K));
        const weights = z.map((x) => Math.exp(v.s * x)), sum = weights.reduce((a, b) => a + b, 0);
        const p = weights.map((w) => w / sum), mean = p.reduce((a, q, k) => a + q * z[k], 0);
        set("prior", line(grid.map(across), grid.map((x) => up(normal(x)))));
        set("target", line(grid.map(across), grid.map((x) => up(normal(x - v.s)))));
        set("stems", z.map((x, k) => "M" + across(x).toFixed(1) + " 220.0V" +
          up(Math.min(K * p[k] * normal(x), 0.6)).toFixed(1)).join(""));
        return "The likeliest of " + K + " candidates is picked " + (K * Math.max(...p)).toFixed(2) +
          " times as often as by chance; the pick is " + (Math.round(100 * mean) / 100 + 0).toFixed(2) +
          " on average, the update " + v.s.toFixed(2) + ".";
      },
    };
  };

  const coin = () => {
    const grid = range(181, (i) => -1.5 + i / 60), up = (y, most) => 220 - 190 * y / most;
    const left = (x) => 160 + 90 * x, right = (x) => 480 + 90 * x;
    return {
      sliders: [["eps", "ε =", 0.25, 4, 0.25, 4], ["beta", "β =", 0.25, 2, 0.25, 1.5]],
      curves: {coin: [2, ""], bell: [2, ""], bound: [1, "6 4"]},
      axis: "M25 220H295M345 220H615",
      labels: [...ticks([-1, 0, 1], left), ...ticks([-1, 0, 1], right),
        [160, 275, "middle", "coordinate over clip"], [480, 275, "middle", "coordinate over clip"],
        [160, 20, "middle", "P(high bit), 0 to 1"], [480, 20, "middle", "information, 0 to 16"]],
      draw: (v) => {
        const kappa = v.eps * v.beta, top = kappa * kappa / 4, step = 1 / Math.tanh(v.eps / 2) / v.beta;
        const high = grid.map((x) => 1 / (1 + Math.exp(-kappa * x)));
        set("coin", line(grid.map(left), high.map((p) => up(p, 1))));
        set("bell", line(grid.map(right), high.map((p) => up(kappa * kappa * p * (1 - p), 16))));
        set("bound", line([345, 615], [up(top, 16), up(top, 16)]));
        return "Steepness " + kappa.toFixed(2) + ": as private, by the bound, as Gaussian noise of" +
          " multiplier " + (2 / kappa).toFixed(2) + ". A bit is read as plus or minus " +
          step.toFixed(2) + " clips.";
      },
    };
  };

  const guess = () => {
    const best = (e) => 1 / (1 + Math.exp(-e)), grid = range(101, (i) => i / 20);
    const across = (e) => 90 + 104 * e, up = (p) => 220 - 380 * (p - 0.5);
    let there = false, answer = false, right = 0, rounds = 0;
    const score = document.createElement("p");
    const deal = () => {
      there = Math.random() < 0.5;
      answer = Math.random() < best(values.eps) ? there : !there;
    };
    const say = () => {
      const so = rounds ? " You were right in " + right + " of " + rounds + " games, " +
        (100 * right / rounds).toFixed(0) + " %." : "";
      score.textContent = "The report says: " + (answer ? "took part." : "did not take part.") + so;
    };
    const play = (yes) => { rounds++; right += yes === there; deal(); };
    const button = (text, act) => {
      const one = document.createElement("button");
      one.type = "button";
      one.textContent = text;
      one.addEventListener("click", () => { act(); say(); });
      bar.append(" ", one);
    };
    return {
      sliders: [["eps", "ε =", 0, 5, 0.25, 1]],
      curves: {best: [2, ""], here: [2, ""]},
      axis: "M90 220H610",
      labels: [...ticks(range(6, (e) => e), across), [350, 275, "middle", "ε"],
        ...[0.5, 0.75, 1].map((p) => [82, up(p) + 5, "end", 100 * p + " %"])],
      draw: (v) => {
        right = rounds = 0;
        set("best", line(grid.map(across), grid.map((e) => up(best(e)))));
        set("here", "M" + across(v.eps).toFixed(1) + " 220.0V" + up(best(v.eps)).toFixed(1));
        deal();
        say();
        return "At ε = " + v.eps.toFixed(2) + " nobody guesses right in more than " +
          (100 * best(v.eps)).toFixed(1) + " % of the games.";
      },
      after: () => {
        bar.append(" Did the client take part?");
        button("yes", () => play(true));
        button("no", () => play(false));
        button("believe 100 reports", () => { for (let i = 0; i < 100; i++) play(answer); });
        score.setAttribute("aria-live", "polite");
        box.append(score);
      },
    };
  };

  const picture = {odds, coin, guess}[script.dataset.draw]();
  const frame = node("svg", {viewBox: "0 0 640 285", role: "img", "aria-label": caption.textContent});
  frame.style.cssText = "width:100%;max-width:640px";
  const path = (width, dash, d) => frame.appendChild(node("path",
    {d: d || "", fill: "none", stroke: "currentColor", "stroke-width": width, "stroke-dasharray": dash}));
  for (const name in picture.curves) paths[name] = path(...picture.curves[name]);
  path(0.5, "", picture.axis);
  for (const [x, y, anchor, text] of picture.labels)
    frame.append(node("text", {x: x, y: y, "text-anchor": anchor, fill: "currentColor"}, text));
  const again = () => { caption.textContent = picture.draw(values); };
  for (const [name, label, low, high, step, value] of picture.sliders) {
    const whole = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, {type: "range", min: low, max: high, step: step, value: value});
    const output = document.createElement("output");
    const read = () => { values[name] = Number(input.value); output.textContent = input.value; };
    input.addEventListener("input", () => { read(); again(); });
    read();
    whole.append(label + " ", input, " ", output);
    bar.append(whole);
  }
  caption.setAttribute("aria-live", "polite");
  box.insertBefore(frame, caption);
  box.insertBefore(bar, caption);
  again();
  if (picture.after) picture.after();
})(document.currentScript);
