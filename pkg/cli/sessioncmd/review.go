package sessioncmd

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

type reviewOptions struct {
	land      bool
	pull      bool
	send      bool
	unchecked bool
	mergeTool bool
	json      bool
	message   string
	branch    string
	into      string
	paths     []string

	again func(without []string, add ...string) string // the user's command with other flags
}

// landFlags are the flags that have no effect without --land or --pr.
var landFlags = []string{"message", "unchecked", "mergetool"}

// inInterface returns a command that opens the interface for what the user's command would land.
func (o reviewOptions) inInterface() string {
	return o.again(append([]string{"land", "pr", "send", "json"}, landFlags...))
}

func NewReviewCmd(a *app.App) *cobra.Command {
	var o reviewOptions
	cmd := &cobra.Command{
		Use:   "review SESSION|TASK… [-- PATH…]",
		Short: "Review agents' commits, and land what you choose",
		Long: `Review the commits of an agent in a terminal interface: choose files, hunks or lines, and
land them as a commit on a branch of your clone, or as a pull request. Notes on lines
become the agent's next prompt. Changes that have landed are not shown again; later
changes to them are. With several sessions or tasks, compare attempts and take parts of
each.

The latest commits are fetched first from running sessions. No code from the guest, and no
hook, runs on this host. Your files, index and current branch are not touched. Files above
10 MiB and apparent secrets land only if you accept them.

With --land, files land without the interface: the given paths, or otherwise what you
chose in it, or everything if you chose nothing. Paths begin at the root of the
repository. Without a terminal, the files are listed.`,
		Example: `  agent-sessionizer review repo
  agent-sessionizer review repo repo@2 repo@3
  agent-sessionizer review repo --land -m 'Fix the parser' -- parser/
  agent-sessionizer review repo --pr`,
		Args:              app.Usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: complete.Many(complete.Sessions(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				args, o.paths = args[:n], args[n:]
			}
			if len(args) == 0 {
				return fail.New(fail.Usage, "no session given").WithHint("agent-sessionizer review --help")
			}
			o.again = func(without []string, add ...string) string { return app.Again(cmd, without, add...) }
			for _, name := range landFlags {
				if cmd.Flags().Changed(name) && !o.land && !o.pull {
					return fail.New(fail.Usage, "--%s needs --land or --pr", name).WithHint("%s", o.again([]string{"send"}, "--land"))
				}
			}
			return runReview(cmd.Context(), a, o, args)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.land, "land", false, "land files without the interface")
	f.BoolVar(&o.pull, "pr", false, "land, push the branch and open a pull request")
	f.BoolVar(&o.send, "send", false, "send unsent notes to the agents")
	f.BoolVar(&o.unchecked, "unchecked", false, "skip the check for secrets and large files")
	f.BoolVar(&o.mergeTool, "mergetool", false, "resolve conflicts in your merge tool (git config merge.tool)")
	f.BoolVar(&o.json, "json", false, "print the files, or what landed, as JSON")
	f.StringVarP(&o.message, "message", "m", "", "`TEXT` of the commit message")
	f.StringVar(&o.branch, "branch", "", "`BRANCH` to land on (default review/NAME)")
	f.StringVar(&o.into, "into", "", "`DIR` of the local clone (default: the session's own, or the working directory)")
	cmd.MarkFlagsMutuallyExclusive("land", "send")
	cmd.MarkFlagsMutuallyExclusive("pr", "send")
	return cmd
}

// reviewed is a session under review.
type reviewed struct {
	view session.View
	row  session.Session
	task *lifecycle.Result // how the task ended that owns it
}

func runReview(ctx context.Context, a *app.App, o reviewOptions, names []string) error {
	if o.branch != "" && !repo.ValidBranch(o.branch) {
		return fail.New(fail.Usage, "invalid branch name %q", o.branch).WithHint("%s", o.again([]string{"branch"}))
	}
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	e, ok := h.(ops.Engine)
	if !ok {
		return fail.New(fail.Usage, "review works on the host of the sessions").WithHint("agent-sessionizer fetch --into DIR %s", ssh.Quote(names[0]))
	}
	all, err := findAll(ctx, e, names)
	if err != nil {
		return err
	}
	clone := o.into
	if clone == "" {
		if clone, err = localClone(all[0].view, true); err != nil {
			return err
		}
	}
	if clone == "" {
		return fail.New(fail.Usage, "review needs a clone of %s on this host", all[0].view.DisplayName()).WithHint("%s", o.again(nil, "--into", "DIR"))
	}
	if clone, err = filepath.Abs(clone); err != nil {
		return fail.New(fail.Host, "find the clone: %w", err)
	}
	steps := a.Con.Steps()
	err = bring(ctx, e, all, clone, func(name string) {
		steps.Update(console.Step{Name: "fetch", State: console.Progress, Detail: name})
	})
	steps.Close()
	if err != nil {
		return err
	}
	asked := review.Options{Clone: clone, Dir: e.Tasks.Sessions.Config.Paths.Reviews(), Branch: o.branch, Paths: o.paths, Sources: sources(all)}
	asked.Fetch = func(ctx context.Context) ([]review.Source, error) {
		if err := bring(ctx, e, all, clone, func(string) {}); err != nil {
			return nil, err
		}
		now, err := findAll(ctx, e, names)
		for i, r := range now {
			if r.view.ID == all[i].view.ID { // a new session may have the name
				all[i] = r
			}
		}
		return sources(all), err
	}
	w, err := review.Open(ctx, asked)
	if err != nil {
		return err
	}
	defer w.Close() //nolint:errcheck // only temporary files may stay
	r := reviewing{a, h, w, pullsOf(e, all[0].view, clone)}
	switch {
	case o.send:
		return sendNotes(ctx, a, h, w)
	case o.land || o.pull:
		return r.landFiles(ctx, o)
	case o.json || !app.Interactive():
		return r.print(o, all)
	}
	return r.showScreen(ctx)
}

// findAll finds the attempts to review, which must be of one repository.
func findAll(ctx context.Context, e ops.Engine, names []string) (all []reviewed, err error) {
	for _, name := range names {
		r, err := findReviewed(ctx, e, name)
		if err != nil {
			return nil, err
		}
		if len(all) > 0 && r.view.RepoKey != all[0].view.RepoKey {
			return nil, fail.New(fail.Usage, "%s and %s are not of the same repository", all[0].view.Name, r.view.Name).WithHint("agent-sessionizer review %s", ssh.Quote(names[0]))
		}
		all = append(all, r)
	}
	return all, nil
}

// findReviewed finds a session, or the session of a task. Both may have ended.
func findReviewed(ctx context.Context, e ops.Engine, name string) (r reviewed, err error) {
	r.view, err = app.FindExact(ctx, e, name)
	if fail.CodeOf(err) == fail.NotFound {
		if t, terr := ops.FindTask.On(ctx, e, ops.FindTaskRequest{Name: name}); terr == nil && t.Session != "" {
			r.view.ID, err = t.Session, nil
		}
	}
	if err != nil {
		return r, err
	}
	if r.row, err = e.Session(ctx, r.view.ID); err != nil {
		return r, err
	}
	r.view = r.row.View()
	if r.view.Base == nil {
		return r, ops.NotCloned(r.view)
	}
	if id := r.view.Task; id != "" {
		t, err := ops.GetTask.On(ctx, e, ops.TaskPath{ID: id})
		if err != nil {
			return r, err
		}
		if o := t.Outcome; o != nil && o.ExitCode != nil {
			r.task = &lifecycle.Result{Name: t.Agent, ExitCode: *o.ExitCode}
		}
	}
	return r, nil
}

// bring copies the agents' latest commits to the clone, and reports the session that it fetches from.
func bring(ctx context.Context, e ops.Engine, all []reviewed, clone string, report func(name string)) error {
	w := session.Work{Sessions: e.Tasks.Sessions}
	for _, r := range all {
		row, err := e.Session(ctx, r.view.ID)
		if err != nil {
			return err
		}
		if row.Phase != session.Ready {
			if err := w.CopyTo(ctx, row, clone); err != nil {
				return err
			}
			continue
		}
		report(r.view.Name)
		conn, err := e.Dial(ctx, r.view.ID, true)
		if err == nil {
			_, err = w.Fetch(ctx, row, conn, clone, repo.FetchOptions{})
			err = errors.Join(err, conn.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func sources(all []reviewed) (out []review.Source) {
	for _, r := range all {
		src := review.Source{ID: r.view.ID, Name: r.view.Name, Title: r.view.DisplayName(), Base: *r.view.Base, Results: r.view.Results}
		if f := r.row.Spec.Fork; f != nil {
			src.Parent = f.Session
		}
		if r.task != nil {
			src.Results = append(src.Results, *r.task)
		}
		out = append(out, src)
	}
	return out
}

func sendPrompt(ctx context.Context, h ops.Host, to review.Source, prompt string) error {
	r := ops.PromptRequest{SessionPath: ops.SessionPath{ID: to.ID}}
	r.Body.Text = prompt
	_, err := ops.SendPrompt.On(ctx, h, r)
	return err
}

// sendNotes gives each agent its notes as the next prompt.
func sendNotes(ctx context.Context, a *app.App, h ops.Host, w *review.Work) error {
	sent := 0
	for _, at := range w.Attempts() {
		prompt, notes := at.Prompt()
		if prompt == "" {
			continue
		}
		if err := sendPrompt(ctx, h, at.Source(), prompt); err != nil {
			return err
		}
		if err := at.MarkSent(notes); err != nil {
			return err
		}
		a.Con.Say("sent %s to %s", complete.Count(len(notes), "note"), at.Source().Title)
		sent += len(notes)
	}
	if sent == 0 {
		a.Con.Say("%s", "no unsent notes")
	}
	return nil
}

// landFiles lands the given paths, or what was chosen, or everything.
func (r reviewing) landFiles(ctx context.Context, o reviewOptions) error {
	if o.pull { // before anything lands
		name, _ := r.work.Branch()
		if err := r.pulls.Check(ctx, name); err != nil {
			return r.landError(err, o)
		}
	}
	done, err := r.landNow(ctx, o)
	var address string
	if err == nil && o.pull {
		address, err = r.openPull(ctx, done)
	}
	if perr := printLanded(r.a, done, address, o.json); perr != nil {
		return perr
	}
	return r.landError(err, o)
}

// landNow lands what the options say. It opens conflicts in the user's merge tool, if that was requested.
func (r reviewing) landNow(ctx context.Context, o reviewOptions) (review.Landed, error) {
	request := review.LandRequest{Message: o.message, Unchecked: o.unchecked, Paths: o.paths}
	if len(o.paths) == 0 && !anyChosen(r.work) {
		request.Paths = []string{"."}
	}
	if len(request.Paths) > 0 && len(r.work.Attempts()) > 1 {
		return review.Landed{}, fail.New(fail.Usage, "cannot land whole paths from several attempts: choose changes in the interface").WithHint("%s", o.inInterface())
	}
	if o.pull && !anyFile(r.work) { // it landed before, without a pull request
		before, err := r.work.Landed(ctx)
		if err != nil || before.Tip != "" {
			before.Message = cmp.Or(o.message, before.Message)
			return before, err
		}
	}
	if !anyFile(r.work) {
		return review.Landed{}, fail.New(fail.NotFound, "nothing to land: %s", nothingLeft(r.work, o)).WithHint("%s", o.inInterface())
	}
	for commits := []review.LandedCommit{}; ; {
		done, err := r.work.Land(ctx, request)
		commits = append(commits, done.Commits...)
		done.Commits = commits
		conflict, ok := errors.AsType[*review.ConflictError](err)
		if !ok || !o.mergeTool {
			return done, err
		}
		for _, c := range conflict.Conflicts {
			resolved, err := r.openTool(ctx, c)
			if err != nil {
				return done, err
			}
			request.Resolutions = append(request.Resolutions, resolved)
		}
		ctx = app.AfterEdit(ctx)
	}
}

func anyFile(w *review.Work) bool {
	return slices.ContainsFunc(w.Attempts(), func(at *review.Attempt) bool { return len(at.Files()) > 0 })
}

func anyChosen(w *review.Work) bool {
	for _, at := range w.Attempts() {
		for i := range at.Files() {
			if at.Mark(i) != review.None {
				return true
			}
		}
	}
	return false
}

// landedView is a landing in the JSON output of review.
type landedView struct {
	review.Landed
	Pull string `json:"pull_request,omitempty"` // its address
}

func printLanded(a *app.App, done review.Landed, pull string, asJSON bool) error {
	if done.Branch == "" {
		return nil // the request was refused
	}
	if asJSON {
		return a.Con.JSON(landedView{done, pull})
	}
	for _, c := range done.Commits {
		if c.Commit == "" {
			a.Con.Say("%s already contains the changes of %s", done.Branch, c.Session)
			continue
		}
		a.Printf("%.12s %s\n", c.Commit, done.Branch)
		for _, f := range c.Files {
			a.Printf("  %s\n", termtext.Line(f))
		}
	}
	switch {
	case pull != "":
		a.Printf("%s\n", pull)
	case len(done.Commits) == 0:
		a.Con.Say("%s", "nothing landed")
	}
	return nil
}

// landError lists what prevented a landing.
func (r reviewing) landError(err error, o reviewOptions) error {
	if findings, ok := errors.AsType[*review.FindingsError](err); ok {
		for _, f := range findings.Findings {
			place := termtext.Line(f.Path)
			if f.Line > 0 {
				place += ":" + strconv.Itoa(f.Line)
			}
			r.a.Con.Say("%s: %s", place, termtext.Line(f.What))
		}
		return fail.New(fail.Policy, "%w", err).WithHint("%s # after you have read the findings", o.again(nil, "--unchecked"))
	}
	if conflict, ok := errors.AsType[*review.ConflictError](err); ok {
		hint := o.again(nil, "--mergetool")
		for _, c := range conflict.Conflicts {
			text := termtext.Line(c.Path)
			if c.Why != "" { // no tool can resolve it
				text += ": " + termtext.Line(c.Why)
				hint = o.inInterface()
			}
			r.a.Con.Say("conflict: %s", text)
		}
		return fail.New(fail.Conflict, "%w", err).WithHint("%s", hint)
	}
	if out, ok := errors.AsType[*review.CheckedOutError](err); ok {
		hint := o.again([]string{"branch"})
		if out.Branch == "review/"+r.work.Attempts()[0].Source().Name {
			hint = "git -C " + ssh.Quote(out.Dir) + " switch --detach"
		}
		return fail.New(fail.Conflict, "%w", err).WithHint("%s", hint)
	}
	if _, ok := errors.AsType[*review.BaseBranchError](err); ok {
		return fail.New(fail.Usage, "%w", err).WithHint("%s", o.again([]string{"branch"}))
	}
	return err
}

// attemptView is an attempt in the JSON output of review.
type attemptView struct {
	Session string             `json:"session"`
	Head    string             `json:"head"`
	Branch  string             `json:"branch"` // that receives what lands
	Files   []fileView         `json:"files"`
	Landed  []string           `json:"landed"` // files of which everything has landed
	Notes   []review.Note      `json:"notes"`
	Results []lifecycle.Result `json:"results"`
}

type fileView struct {
	review.File
	Status string `json:"status"` // A, M, D, R or T, as git has them
	Chosen string `json:"chosen"` // "no", "part" or "yes"
}

var chosenWords = map[review.Mark]string{review.None: "no", review.Part: "part", review.All: "yes"}

// nothingLeft says why a review has no files.
func nothingLeft(w *review.Work, o reviewOptions) string {
	if len(o.paths) > 0 {
		return "no changes left in " + termtext.Line(strings.Join(o.paths, ", "))
	}
	for _, at := range w.Attempts() {
		if len(at.Landed()) > 0 {
			return "all committed changes have landed"
		}
	}
	return "no committed changes"
}

// print lists the files under review.
func (r reviewing) print(o reviewOptions, all []reviewed) error {
	a, w := r.a, r.work
	branch, _ := w.Branch()
	views, rows := []attemptView{}, [][]string{}
	for n, at := range w.Attempts() {
		v := attemptView{
			Session: at.Source().Name, Head: at.Head(), Branch: branch, Files: []fileView{},
			Landed: append([]string{}, at.Landed()...), Notes: append([]review.Note{}, at.Notes()...), Results: append([]lifecycle.Result{}, at.Source().Results...),
		}
		for i, f := range at.Files() {
			v.Files = append(v.Files, fileView{f, string(rune(f.Status)), chosenWords[at.Mark(i)]})
			rows = append(rows, []string{strconv.Itoa(n + 1), string(rune(f.Status)), chosenWords[at.Mark(i)], cmp.Or(f.Path, f.OldPath)})
		}
		views = append(views, v)
	}
	if o.json {
		return a.Con.JSON(views)
	}
	if len(rows) == 0 {
		a.Con.Say("%s", "nothing to review: "+nothingLeft(w, o))
		for _, s := range all {
			if s.row.Phase == session.Ready {
				a.Con.Say("%s", "uncommitted changes: agent-sessionizer diff "+s.view.Name)
			}
		}
		return nil
	}
	a.Con.Table([]string{"ATTEMPT", "STATUS", "CHOSEN", "FILE"}, rows)
	return nil
}
