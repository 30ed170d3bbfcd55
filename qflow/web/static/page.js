"use strict";
// Renews what is marked with data-live from the page itself, as the server makes it anew, and draws the charts.
(() => {
  const EACH_MS = 2000;
  const PATIENCE_MS = 10000;
  const CHARTS = {
    rates: [["put", "put", "--one"], ["delivered", "delivered", "--two"], ["acked", "acked", "--three"], ["published", "published", "--four"]],
    messages: [["messages", "messages", "--one"], ["acquired_messages", "held", "--two"]],
    memory: [["resident_bytes", "memory", "--one"], ["spilled_bytes", "spilled", "--two"]],
  };
  const MIB = new Set(["resident_bytes", "spilled_bytes"]);
  const MOST_POINTS = 600;
  const offline = document.getElementById("offline");
  const live = [...document.querySelectorAll("[data-live]")];
  const places = [...document.querySelectorAll("[data-chart]")];
  let points = [];
  let charts = [];
  let asking = 0; // since when nothing was answered

  function say(sentence) {
    if (!offline) return;
    offline.textContent = sentence;
    offline.hidden = !sentence;
  }

  async function asked(address, headers) {
    asking ||= Date.now();
    const response = await fetch(address, { headers, redirect: "manual", cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    asking = 0;
    if (response.type === "opaqueredirect" || response.status === 401) throw new Error("you are logged out: open the page again");
    if (!response.ok) throw new Error(response.status === 404 ? "this is gone" : `the server answers ${response.status}`);
    return response;
  }

  async function renew() {
    if (!live.length) return;
    const response = await asked(location.href, { "X-Live": "1", "Accept": "text/html" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const old of live) {
      const made = page.getElementById(old.id);
      if (!made || made.isEqualNode(old)) continue;
      const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      old.replaceChildren(...[...made.childNodes].map((one) => document.importNode(one, true)));
      if (focused) [...old.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus();
    }
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function table(series) {
    const times = points.map((one) => one.at_s);
    return [times, ...series.map(([field]) => points.map((one) => one[field] === undefined ? null : MIB.has(field) ? one[field] / 1048576 : one[field]))];
  }

  function clock(seconds) {
    return new Date(seconds * 1000).toISOString().slice(11, 19);
  }

  function draw() {
    for (const chart of charts) chart.plot.destroy();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    charts = places.map((place) => {
      const series = CHARTS[place.dataset.chart];
      const options = {
        width: place.clientWidth, height: 190, axes: [{ ...axis, space: 70, values: (_u, times) => times.map(clock) }, { ...axis, size: 62 }],
        scales: { y: { range: (_u, _low, high) => [0, Math.max(1, (high || 0) * 1.1)] } },
        series: [{ label: "UTC", value: (_u, time) => time == null ? "--" : clock(time) }, ...series.map(([, label, name]) => ({ label, stroke: colour(name), width: 2, points: { show: false } }))],
      };
      return { place, series, plot: new uPlot(options, table(series), place) };
    });
  }

  async function follow() {
    if (!places.length || typeof uPlot === "undefined") return;
    const since = points.length ? points[points.length - 1].at_s : 0;
    const found = await (await asked(`/api/live?since=${since}`, {})).json();
    // Where the server's clock was set back, those of before are later than any that come.
    points = found.at_s < since ? [] : points.concat(found.points).slice(-MOST_POINTS);
    if (!charts.length) draw();
    for (const chart of charts) {
      chart.plot.setData(table(chart.series));
      chart.place.dataset.points = points.length;
    }
  }

  function why(error) {
    if (error.name === "TimeoutError") return `the server has not answered for ${Math.round((asking ? Date.now() - asking : PATIENCE_MS) / 1000)} s`;
    return error instanceof TypeError ? "the server does not answer" : error.message;
  }

  async function turn() {
    if (document.hidden) asking = 0;
    else {
      try {
        await follow();
        await renew();
        say("");
      } catch (error) {
        say(`These figures are old: ${why(error)}.`);
      }
    }
    setTimeout(turn, EACH_MS);
  }

  if (live.length || places.length) {
    if (places.length) {
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (charts.length) draw(); });
      addEventListener("resize", () => charts.forEach((one) => one.plot.setSize({ width: one.place.clientWidth, height: 190 })));
    }
    turn();
  }
})();
