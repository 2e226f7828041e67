// What is wrong with a page as it is laid out; run in it by browser.py.
(() => {
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const words = e => `${e.tagName.toLowerCase()}: ${(e.innerText || e.alt || "").trim().slice(0, 60)}`;
  const boxed = e => e && (scrolls(e) || (e !== document.body && boxed(e.parentElement)));
  const root = document.documentElement, main = document.querySelector("main") || document.body;
  const right = main.getBoundingClientRect().right, cut = [];
  for (const e of main.querySelectorAll("pre, pre code")) {
    if (e.offsetWidth && e.scrollWidth > e.clientWidth + 1 && e.clientWidth) cut.push(words(e));
  }
  for (const e of main.querySelectorAll("table, img, svg, math[display=block], .bar, p, li, h1, h2, h3, h4")) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > right + 2 && !boxed(e)) cut.push(words(e));
  }
  const slides = Math.max(0, root.scrollWidth - root.clientWidth);
  for (const e of slides > 1 ? document.body.querySelectorAll("*") : []) {
    if (e.getBoundingClientRect().right > root.clientWidth + 1 && e.offsetWidth && !boxed(e)) cut.push(words(e));
  }
  const foreign = performance.getEntriesByType("resource").map(r => r.name)
    .filter(n => !n.startsWith(location.origin) && !n.startsWith("data:") && !n.startsWith("blob:"));
  return { slides, cut, foreign, screens: +(root.scrollHeight / 900).toFixed(1) };
})()
