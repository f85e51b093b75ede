"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Colours: as the system, light, or dark. A page opened from a file may have no storage.
  const theme = document.getElementById("theme");
  const themes = [["", "Auto", "as the system"], ["light", "Light", "light"], ["dark", "Dark", "dark"]];
  const stored = (write) => {
    try {
      if (write === undefined) return localStorage.getItem("meshwright-theme") || "";
      localStorage.setItem("meshwright-theme", write);
    } catch { /* not remembered */ }
    return "";
  };
  const dress = (value) => {
    const [key, label, words] = themes.find((t) => t[0] === value) || themes[0];
    document.documentElement.dataset.theme = key;
    theme.textContent = label;
    theme.setAttribute("aria-label", `colours: ${words}`);
    return key;
  };
  let dressed = dress(stored());
  theme.addEventListener("click", () => {
    dressed = dress(themes[(themes.findIndex((t) => t[0] === dressed) + 1) % themes.length][0]);
    stored(dressed);
  });

  const reader = (start) => {
    let place = start;
    while (place && !place.querySelector(":scope > .readout")) place = place.parentElement;
    const line = place && place.querySelector(":scope > .readout");
    if (!line) return () => {};
    const hint = line.textContent;
    return (text) => {
      line.textContent = text || hint;
      line.classList.toggle("on", Boolean(text));
    };
  };

  // Bars: one stop for the tab key, arrows within; what is pointed at or in focus is spelled out below.
  for (const bar of all(".bar")) {
    const parts = all(".part", bar);
    const say = reader(bar);
    const open = (part) => {
      if (part.dataset.run === undefined) return;
      const root = bar.closest(".col, section");
      for (const block of all("[data-block]", root)) block.hidden = block.dataset.block !== part.dataset.run;
    };
    bar.addEventListener("pointerover", (e) => { const p = e.target.closest(".part"); if (p) say(p.dataset.tip); });
    bar.addEventListener("pointerleave", () => say(""));
    bar.addEventListener("click", (e) => { const p = e.target.closest(".part"); if (p) { open(p); say(p.dataset.tip); } });
    bar.addEventListener("focusin", (e) => say(e.target.dataset.tip));
    bar.addEventListener("focusout", () => say(""));
    bar.addEventListener("keydown", (e) => {
      const at = parts.indexOf(document.activeElement);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: parts.length - 1 }[e.key];
      if (at >= 0 && (e.key === "Enter" || e.key === " ")) { open(parts[at]); e.preventDefault(); }
      if (at < 0 || to === undefined || !parts[to]) return;
      e.preventDefault();
      parts[at].tabIndex = -1;
      parts[to].tabIndex = 0;
      parts[to].focus();
    });
  }

  // The memory curve: a cursor with the time and the memory held there.
  const units = [[1024 ** 4, "TiB"], [1024 ** 3, "GiB"], [1024 ** 2, "MiB"], [1024, "KiB"], [1, "B"]];
  const size = (b) => { const [k, u] = units.find((x) => b >= x[0]) || units[4]; return `${(b / k).toFixed(k > 1 ? 1 : 0)}\u202f${u}`; };
  const time = (s) => { const [k, u] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find((x) => s >= x[0]) || [1e-6, "µs"]; return `${(s / k).toPrecision(3)}\u202f${u}`; };
  for (const plot of all(".plot")) {
    const points = plot.dataset.points.split(";").map((p) => p.split(",").map(Number));
    const end = points[points.length - 1][0] || 1;
    const cursor = plot.querySelector(".cursor");
    const say = reader(plot);
    let at = 0;
    const show = (t) => {
      at = Math.min(Math.max(t, 0), end);
      const k = Math.max(points.findIndex((p) => p[0] >= at), 1);
      const [[t0, b0], [t1, b1]] = [points[k - 1], points[k]];
      const held = t1 > t0 ? b0 + ((b1 - b0) * (at - t0)) / (t1 - t0) : b1;
      cursor.hidden = false;
      cursor.style.left = `${(100 * at) / end}%`;
      say(`At ${time(at)} of ${time(end)} a device holds ${size(held)}.`);
    };
    const leave = () => { cursor.hidden = true; say(""); };
    plot.addEventListener("pointermove", (e) => { const r = plot.getBoundingClientRect(); show((end * (e.clientX - r.left)) / r.width); });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("focus", () => show(at));
    plot.addEventListener("keydown", (e) => {
      const to = { ArrowRight: at + end / 50, ArrowLeft: at - end / 50, Home: 0, End: end }[e.key];
      if (to === undefined) return;
      e.preventDefault();
      show(to);
    });
  }

  // Shards: the piece of every tensor that the chosen device holds, and which devices hold the same piece of all of them.
  for (const box of all(".mesh")) {
    const mesh = JSON.parse(box.dataset.mesh);
    const sliders = all("input", box);
    const cells = all("[data-device]", box);
    const pieces = all("[data-piece]", box.parentElement).map((rect) => [rect, JSON.parse(rect.dataset.piece)]);
    const sizes = new Map(mesh);
    const place = (device) => {
      const at = new Map();
      for (const [axis, n] of [...mesh].reverse()) { at.set(axis, device % n); device = Math.floor(device / n); }
      return at;
    };
    const piece = (axes, at) => axes.reduce(([k, n], a) => [k * (sizes.get(a) || 1) + (at.get(a) || 0), n * (sizes.get(a) || 1)], [0, 1]);
    const show = () => {
      const at = new Map(mesh.map(([axis]) => [axis, 0]));
      for (const s of sliders) { at.set(s.dataset.axis, Number(s.value)); s.previousElementSibling.querySelector("output").textContent = s.value; }
      const device = mesh.reduce((k, [axis, n]) => k * n + at.get(axis), 0);
      box.querySelector(".device").textContent = device.toLocaleString("en");
      const cut = new Set();
      for (const [rect, [down, across, beside]] of pieces) {
        const [[i, m], [j, n]] = [piece(down[0], at), piece(across[0], at)];
        // A marked piece is never drawn thinner than the eye sees: the last one stays inside.
        rect.setAttribute("y", 0.5 + Math.min((down[1] * i) / m, down[1] - Number(rect.getAttribute("height"))));
        rect.setAttribute("x", 0.5 + Math.min((across[1] * j) / n, across[1] - Number(rect.getAttribute("width"))));
        if (rect.classList.contains("mine")) for (const a of [...down[0], ...across[0], ...beside[0]]) cut.add(a);
      }
      for (const c of cells) {
        const k = Number(c.dataset.device);
        const there = place(k);
        c.className = k === device ? "on" : cut.size && [...cut].every((a) => there.get(a) === at.get(a)) ? "same" : "";
      }
    };
    for (const s of sliders) s.addEventListener("input", show);
    box.addEventListener("click", (e) => {
      if (e.target.dataset.device === undefined) return;
      const at = place(Number(e.target.dataset.device));
      for (const s of sliders) s.value = String(at.get(s.dataset.axis));
      show();
    });
    show();
  }
})();
