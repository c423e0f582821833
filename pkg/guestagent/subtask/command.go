package subtask

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// view is what the host says about a subtask.
type view struct {
	ID, Name, State, Branch string
	Depth                   int
	Outcome                 *struct{ Result, Reason string }
	Notices                 []string
}

func (v view) over() bool {
	return v.State == "COMPLETED" || strings.HasPrefix(v.State, "FAILED") || v.State == "CANCELLED"
}

// IO are the streams of a command.
type IO struct {
	In        io.Reader
	Out, Errs io.Writer
}

// options are the flags of all commands.
type options struct {
	prompt, agent, model, branch, commit, file, name, key, get string
	timeout                                                    time.Duration
	json                                                       bool
	command                                                    []string
}

// parse reads flags, which may be among the arguments. What follows -- is a command.
func parse(name string, args []string, define func(*flag.FlagSet, *options)) (o options, rest []string, err error) {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	define(f, &o)
	for i, a := range args {
		if a == "--" {
			o.command, args = args[i+1:], args[:i]
			break
		}
	}
	for len(args) > 0 {
		if err := f.Parse(args); err != nil {
			return o, nil, fail.New(fail.Usage, "%s: %w", name, err).WithHint("agent-guest task")
		}
		if args = f.Args(); len(args) > 0 {
			rest, args = append(rest, args[0]), args[1:]
		}
	}
	return o, rest, nil
}

// one returns the only argument, the id of a subtask.
func one(name string, rest []string) (string, error) {
	if len(rest) != 1 || rest[0] == "" {
		return "", fail.New(fail.Usage, "%s: takes the id of one subtask", name).WithHint("agent-guest task list")
	}
	return "/tasks/" + escape(rest[0]), nil
}

// escape returns one part of a path. With its dots escaped, no part means another directory.
func escape(part string) string { return strings.ReplaceAll(url.PathEscape(part), ".", "%2E") }

// Submit submits a subtask, and prints its id.
func Submit(ctx context.Context, g sys.Guest, args []string, s IO) error {
	o, rest, err := parse("task submit", args, func(f *flag.FlagSet, o *options) {
		f.StringVar(&o.prompt, "prompt", "", "")
		f.StringVar(&o.agent, "agent", "", "")
		f.StringVar(&o.model, "model", "", "")
		f.StringVar(&o.branch, "branch", "", "")
		f.StringVar(&o.commit, "commit", "", "")
		f.StringVar(&o.file, "f", "", "")
		f.StringVar(&o.name, "name", "", "")
		f.StringVar(&o.key, "key", "", "")
	})
	if err == nil && o.file != "" && (o.prompt+o.agent+o.model+o.branch+o.commit+o.name != "" || len(o.command) > 0) {
		err = fail.New(fail.Usage, "task submit: with -f, the manifest says everything").WithHint("write it into %s, or leave -f out", o.file)
	}
	if err == nil && len(rest) > 0 {
		err = fail.New(fail.Usage, "task submit: takes no arguments before --").WithHint(`agent-guest task submit --prompt "TEXT"`)
	}
	if err != nil {
		return err
	}
	r := request{method: "POST", path: "/tasks", header: map[string]string{}}
	if o.key == "" {
		var key [16]byte
		_, _ = rand.Read(key[:]) // never fails
		o.key = hex.EncodeToString(key[:])
	}
	if strings.ContainsFunc(o.key, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fail.New(fail.Usage, "task submit: the key must be printable ASCII without spaces")
	}
	r.header["Idempotency-Key"] = o.key
	switch o.file {
	case "":
		r.body, err = o.manifest(ctx)
	case "-":
		r.body, err = io.ReadAll(io.LimitReader(s.In, maxAnswer))
	default:
		r.body, err = sys.ReadFile(o.file, maxAnswer)
	}
	if err != nil {
		return err
	}
	var v view
	if err := ask(ctx, g, r, &v); err != nil {
		return err
	}
	for _, n := range v.Notices {
		fmt.Fprintf(s.Errs, "agent-guest: %s\n", n)
	}
	_, err = fmt.Fprintln(s.Out, v.ID)
	return err
}

// manifest returns the manifest that the flags describe.
func (o options) manifest(ctx context.Context) ([]byte, error) {
	agent := map[string]any{"kind": cmp.Or(o.agent, "claude")}
	switch {
	case len(o.command) > 0:
		agent = map[string]any{"kind": "command", "command": o.command}
	case o.prompt == "":
		return nil, fail.New(fail.Usage, "task submit: --prompt, -f or -- COMMAND is missing").WithHint(`agent-guest task submit --prompt "TEXT"`)
	}
	if o.prompt != "" {
		agent["prompt"] = o.prompt
	}
	if o.model != "" {
		agent["model"] = o.model
	}
	m := map[string]any{"version": "1", "kind": "Task", "agent": agent}
	if o.name != "" {
		m["metadata"] = map[string]any{"name": o.name}
	}
	at := map[string]any{}
	if o.branch != "" {
		at["branch"] = o.branch
	}
	if o.commit != "" {
		id, err := git(ctx, "rev-parse", "--verify", "--end-of-options", o.commit+"^{commit}")
		if err != nil {
			return nil, err
		}
		at["commit"] = strings.TrimSpace(id)
	}
	if len(at) > 0 {
		m["repository"] = at
	}
	return json.Marshal(m)
}

// git runs git in the current directory.
func git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fail.New(fail.Failure, "git %s: %w: %s", args[0], err, strings.TrimSpace(errs.String())).WithHint("cd to the checkout")
	}
	return string(out), nil
}

// List prints the subtasks.
func List(ctx context.Context, g sys.Guest, args []string, s IO) error {
	o, _, err := parse("task list", args, func(f *flag.FlagSet, o *options) { f.BoolVar(&o.json, "json", false, "") })
	if err != nil {
		return err
	}
	r := request{method: "GET", path: "/tasks"}
	if o.json {
		return line(s.Out, call(ctx, g, r, s.Out))
	}
	var page struct{ Tasks []view }
	if err := ask(ctx, g, r, &page); err != nil {
		return err
	}
	for _, v := range page.Tasks {
		if _, err := fmt.Fprintf(s.Out, "%s  %-12s  %d  %s\n", v.ID, v.State, v.Depth, v.Name); err != nil {
			return err
		}
	}
	return nil
}

func line(out io.Writer, err error) error {
	if err == nil {
		_, err = fmt.Fprintln(out)
	}
	return err
}

// Show prints a subtask as JSON.
func Show(ctx context.Context, g sys.Guest, args []string, s IO) error {
	_, rest, err := parse("task show", args, func(*flag.FlagSet, *options) {})
	path := ""
	if err == nil {
		path, err = one("task show", rest)
	}
	if err != nil {
		return err
	}
	return line(s.Out, call(ctx, g, request{method: "GET", path: path}, s.Out))
}

// Wait waits until subtasks have ended. It fails if one did not succeed.
func Wait(ctx context.Context, g sys.Guest, args []string, s IO) error {
	o, rest, err := parse("task wait", args, func(f *flag.FlagSet, o *options) { f.DurationVar(&o.timeout, "timeout", 0, "") })
	if err == nil && len(rest) == 0 {
		err = fail.New(fail.Usage, "task wait: takes ids of subtasks").WithHint("agent-guest task list")
	}
	if err != nil {
		return err
	}
	if o.timeout > 0 {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	var failed []string
	for _, id := range rest {
		var v view
		for !v.over() {
			err := ask(ctx, g, request{method: "GET", path: "/tasks/" + escape(id) + "?wait=50"}, &v)
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fail.New(fail.Timeout, "subtask %s has not ended within %v", id, o.timeout).WithHint("agent-guest task wait %s", id)
			}
			if err != nil {
				return err
			}
		}
		reason := ""
		if v.Outcome != nil {
			reason = v.Outcome.Reason
		}
		fmt.Fprintf(s.Out, "%s  %s  %s\n", v.ID, v.State, reason)
		if v.State != "COMPLETED" {
			failed = append(failed, v.ID)
		}
	}
	if len(failed) > 0 {
		return fail.New(fail.Failure, "not completed: %s", strings.Join(failed, ", ")).WithHint("agent-guest task show %s", failed[0])
	}
	return nil
}

// Artifacts lists the artifacts of a subtask, or prints one.
func Artifacts(ctx context.Context, g sys.Guest, args []string, s IO) error {
	o, rest, err := parse("task artifacts", args, func(f *flag.FlagSet, o *options) {
		f.StringVar(&o.get, "get", "", "")
		f.BoolVar(&o.json, "json", false, "")
	})
	path := ""
	if err == nil {
		path, err = one("task artifacts", rest)
	}
	if err != nil {
		return err
	}
	path += "/artifacts"
	if o.get != "" {
		for part := range strings.SplitSeq(o.get, "/") {
			path += "/" + escape(part)
		}
		return call(ctx, g, request{method: "GET", path: path}, s.Out)
	}
	if o.json {
		return line(s.Out, call(ctx, g, request{method: "GET", path: path}, s.Out))
	}
	var list struct {
		Artifacts []struct {
			Name string
			Size int64
		}
	}
	if err := ask(ctx, g, request{method: "GET", path: path}, &list); err != nil {
		return err
	}
	for _, a := range list.Artifacts {
		fmt.Fprintf(s.Out, "%10d  %s\n", a.Size, a.Name)
	}
	return nil
}

// Fetch brings the commits of a subtask into the checkout, as the branch agent-ID.
func Fetch(ctx context.Context, g sys.Guest, args []string, s IO) error {
	_, rest, err := parse("task fetch", args, func(*flag.FlagSet, *options) {})
	path := ""
	if err == nil {
		path, err = one("task fetch", rest)
	}
	if err != nil {
		return err
	}
	f, err := os.CreateTemp("", "agent-guest-*.bundle")
	if err != nil {
		return fail.New(fail.Host, "create a bundle: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	if err := errors.Join(call(ctx, g, request{method: "GET", path: path + "/commits"}, f), f.Close()); err != nil {
		return err
	}
	heads, err := git(ctx, "bundle", "list-heads", f.Name())
	if err != nil {
		return err
	}
	branch := "agent-" + rest[0]
	for l := range strings.Lines(heads) {
		if _, name, _ := strings.Cut(strings.TrimSpace(l), " "); strings.HasSuffix(name, "/heads/"+branch) {
			if _, err := git(ctx, "-c", "fetch.fsckObjects=true", "fetch", "-q", f.Name(), "+"+name+":refs/heads/"+branch); err != nil {
				return err
			}
			_, err = fmt.Fprintln(s.Out, branch)
			return err
		}
	}
	return fail.New(fail.NotFound, "subtask %s has no commits on %s", rest[0], branch)
}

// Cancel cancels a subtask and everything below it.
func Cancel(ctx context.Context, g sys.Guest, args []string, s IO) error {
	_, rest, err := parse("task cancel", args, func(*flag.FlagSet, *options) {})
	path := ""
	if err == nil {
		path, err = one("task cancel", rest)
	}
	if err != nil {
		return err
	}
	var v view
	if err := ask(ctx, g, request{method: "DELETE", path: path}, &v); err != nil {
		return err
	}
	_, err = fmt.Fprintf(s.Out, "%s  %s\n", v.ID, v.State)
	return err
}

// MCP connects standard input and output with the host's server of the Model Context Protocol.
func MCP(ctx context.Context, g sys.Guest, s IO) error {
	c, err := dial(ctx, g)
	if err != nil {
		return fail.New(fail.Host, "%w", err).WithHint("on the host, allow subtasks: agent-sessionizer config edit config.yaml # subtasks: {count: 10}")
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	r := request{method: "GET", path: "/mcp", header: map[string]string{"Connection": "Upgrade", "Upgrade": "mcp"}}
	if err := r.send(c, g, "HTTP/1.1"); err != nil {
		return fail.New(fail.Host, "%w: %w", errBroken, err)
	}
	in := bufio.NewReader(c)
	status, length, err := readHead(in)
	if err != nil {
		return fail.New(fail.Host, "%w: %w", errBroken, err)
	}
	if status != 101 {
		return problem(status, io.LimitReader(in, min(length, maxAnswer)))
	}
	go func() {
		_, _ = io.Copy(c, s.In)
		_ = c.Close() // the client is done
	}()
	_, err = io.Copy(s.Out, in)
	if errors.Is(err, os.ErrClosed) || strings.Contains(fmt.Sprint(err), "closed") {
		return nil
	}
	return err
}
