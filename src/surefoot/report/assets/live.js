// A live page asks its server for the sections that changed since it last asked, and draws those.

const PAUSE_MS = 1000;
const MOST_PAUSE_MS = 15000;

let cursor = null;
let lastNews = 0;

// A run that was killed says nothing; after a while the page says so.
function tellSilence() {
  const minutes = Math.floor((performance.now() - lastNews) / 60000);
  const badge = document.getElementById("live");
  if (data.head.state === "running" && minutes >= 1) badge.textContent = `running, quiet for ${minutes} min`;
}

async function ask() {
  const began = performance.now();
  const answer = await fetch(`/data?since=${encodeURIComponent(cursor ?? data.cursor ?? "")}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const news = await answer.json();
  cursor = news.cursor;
  if (Object.keys(news.sections).length) {
    Object.assign(data, news.sections);
    drawSections(Object.keys(news.sections));
    lastNews = performance.now();
  }
  tellSilence();
  return performance.now() - began;
}

async function follow() {
  let pause = PAUSE_MS;
  for (;;) {
    await new Promise((resume) => setTimeout(resume, pause));
    if (document.hidden) continue; // the page is not visible: the next request catches up
    try {
      // A long run takes the server a while to read: it is asked less often, so that it stays below a fifth of its time.
      pause = Math.min(Math.max((await ask()) * 5, PAUSE_MS), MOST_PAUSE_MS);
    } catch (error) {
      pause = Math.min(pause * 2, MOST_PAUSE_MS);
      const badge = document.getElementById("live");
      if (badge) {
        badge.textContent = "server gone";
        badge.title = String(error.message);
        badge.className = "live gone";
      }
      document.title = `Server gone · ${data.head.script.split("/").pop()}`;
    }
  }
}

globalThis.surefoot = { view, zoomTo, showAll, visitStep };
begin();
