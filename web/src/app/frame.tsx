/** What is around every view: navigation, who is signed in, and that this is for research. */
import type { FunctionComponent } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Segmented } from "../ui/controls";
import { Notice, Rejection } from "../ui/notice";
import { Empty, Loading, Whole } from "../ui/states";
import { VIEWS } from "../views/registry";
import { ask, Away, isAway } from "./away";
import { Glossary, Glossed } from "./glossary";
import icon from "./icon.svg";
import { Keys } from "./keys";
import { address, place } from "./router";
import { actor, has, refusal, resume, returns, session, signOut, state } from "./session";
import { SignIn, SignInAgain } from "./sign-in";
import { chooseTheme, theme } from "./theme";
import { Tour } from "./tour";
import { leave, Leaving } from "./unsaved";

const THEMES = [
  { value: "system", label: "Auto" },
  { value: "light", label: "Light" },
  { value: "dark", label: "Dark" },
] as const;

export function Frame() {
  const isOpen = state.value === "signed-in" || state.value === "ended";
  const views = isOpen ? VIEWS.filter((view) => view.roles.some(has)) : [];
  const current = views.find((view) => view.name === place.value.view) ?? (location.hash === "" ? views[0] : undefined);
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={skip}>
        Skip to content
      </a>
      <header class="topbar">
        <a class="wordmark" href={address(views[0]?.name ?? "look")}>
          <img src={icon} alt="" />
          Locum
        </a>
        <nav class="tabs" aria-label="Views" data-tour="views">
          {views.map((view) => (
            <a key={view.name} href={address(view.name)} aria-current={view === current ? "page" : undefined}>
              {view.title}
            </a>
          ))}
        </nav>
        <span class="grow" />
        {isOpen && (
          <span class="row" data-tour="help">
            <Glossary />
            <Keys />
          </span>
        )}
        <span class="research">Research use only</span>
        <Segmented label="Theme" value={theme.value} options={THEMES} onChange={chooseTheme} />
        {session.value?.authenticated && (
          <span class="who">
            <span class="name">{actor.value}</span>
            <button type="button" class="button small" onClick={() => void leave(() => void signOut())}>
              Sign out
            </button>
          </span>
        )}
      </header>
      <div class="frame-notes">
        <Away />
        {state.value === "signed-in" && <Rejection error={refusal.value} />}
      </div>
      <main id="main" tabIndex={-1}>
        <Content view={current?.name} />
      </main>
      {state.value === "signed-in" && <Leaving />}
      {state.value === "signed-in" && <Tour />}
      {state.value === "ended" && <SignInAgain />}
    </div>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Content({ view }: { view: string | undefined }) {
  if (state.value === "starting" || (state.value === "unknown" && isAway.value)) return <Whole title="Locum"><Loading /></Whole>;
  if (state.value === "signed-out") return <div class="center"><SignIn /></div>;
  if (state.value === "unknown") return <Whole title="Locum"><Rejection error={refusal.value} onRetry={() => void resume()} /></Whole>;
  if (view === undefined) {
    return (
      <Whole title="Locum">
        <Notice title="Your roles do not include this view">
          {`${actor.value} has the roles: ${session.value?.roles.join(", ") || "none"}. Ask an admin for another key.`}
        </Notice>
      </Whole>
    );
  }
  return <Loaded key={`${view} ${returns.value}`} name={view} />;
}

function Loaded({ name }: { name: string }) {
  const [component, setComponent] = useState<{ View: FunctionComponent } | null>(null);
  const [failure, setFailure] = useState<unknown>(null);
  const view = VIEWS.find((each) => each.name === name)!;
  useEffect(() => {
    document.title = `${view.title} · Locum`;
    view.load().then(
      (module) => setComponent({ View: module.default }),
      () => {
        // Its file may be missing since the service is away: then the view is loaded again when it is back.
        void ask();
        setFailure(new Error("The view could not be loaded."));
      },
    );
  }, [name]);
  if (failure !== null && isAway.value) {
    return <Whole title={view.title}><Empty title="This view is not here yet">It opens when the service answers again.</Empty></Whole>;
  }
  if (failure !== null) return <Whole title={view.title}><Rejection error={failure} onRetry={() => location.reload()} /></Whole>;
  if (component === null) return <Whole title={view.title}><Loading /></Whole>;
  return <Glossed><component.View /></Glossed>;
}
