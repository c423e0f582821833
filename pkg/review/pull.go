package review

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Pulls opens pull requests from this host.
type Pulls struct {
	Clone string // the user's clone
	Key   string // of the session's repository, to which the branch is pushed
	Base  string // branch that the agent started from; "" for the repository's default
	// Token returns the token for the API of a host; an empty one if the user has none. It is not
	// called if gh is logged in.
	Token func(ctx context.Context, host string) (secret.Value, error)
	API   string // URL of the API; "" for that of GitHub on the repository's host
}

// pullTarget is where a pull request goes, and how it is opened.
type pullTarget struct {
	remote     string // of the clone
	host, slug string
	base       string // branch
	opener     opener
}

// opener finds and opens pull requests.
type opener interface {
	// find returns the address of an open pull request of a branch, or "".
	find(ctx context.Context, t pullTarget, branch string) (string, error)
	open(ctx context.Context, t pullTarget, branch, title, body string) (string, error)
}

// BaseBranchError reports a branch that pull requests merge into, and which therefore has none.
type BaseBranchError struct{ Branch string }

// Error names the branch.
func (e *BaseBranchError) Error() string {
	return fmt.Sprintf("cannot open a pull request from %s: it needs a branch of its own", e.Branch)
}

// Check returns an error if a pull request of that branch cannot be opened. It changes nothing.
func (p Pulls) Check(ctx context.Context, branch string) error {
	_, err := p.target(ctx, branch)
	return err
}

// Create pushes the branch of a landing and opens a pull request, unless the branch has one. It returns the
// address of the pull request.
func (p Pulls) Create(ctx context.Context, done Landed, progress repo.Progress) (string, error) {
	t, err := p.target(ctx, done.Branch)
	if err != nil {
		return "", err
	}
	if done.Tip == "" {
		return "", fail.New(fail.Conflict, "branch %s has no commit to open a pull request for", done.Branch)
	}
	if err := repo.PushBranch(ctx, p.Clone, t.remote, done.Branch, done.Tip, progress); err != nil {
		return "", err
	}
	address, err := t.opener.find(ctx, t, done.Branch)
	if err != nil || address != "" {
		return address, err
	}
	title, body, _ := strings.Cut(strings.TrimSpace(done.Message), "\n")
	address, err = t.opener.open(ctx, t, done.Branch, title, strings.TrimSpace(body))
	if err != nil {
		return "", fail.New(fail.CodeOf(err), "branch %s was pushed, but opening the pull request failed: %w", done.Branch, err).WithHint("%s", fail.HintOf(err))
	}
	return address, nil
}

// target checks everything that is needed to push a branch and to open a pull request.
func (p Pulls) target(ctx context.Context, branch string) (t pullTarget, err error) {
	name, ref, err := repo.Remote(ctx, p.Clone, p.Key)
	if err != nil {
		return t, err
	}
	if ref.IsLocal() {
		return t, fail.New(fail.Conflict, "cannot open a pull request: remote %s is a local directory", name).WithHint("git -C %s push %s %s", ssh.Quote(p.Clone), name, branch)
	}
	main, err := repo.DefaultBranch(ctx, p.Clone, name)
	if err != nil {
		return t, err
	}
	t = pullTarget{remote: name, base: cmp.Or(p.Base, main), slug: ref.Slug}
	t.host, _, _ = strings.Cut(ref.Key, "/")
	switch branch {
	case t.base, main, "main", "master":
		return t, fail.New(fail.Usage, "%w", &BaseBranchError{branch})
	}
	if t.base == "" {
		return t, fail.New(fail.Conflict, "cannot find the base branch for the pull request").WithHint("git -C %s remote set-head %s --auto", ssh.Quote(p.Clone), name)
	}
	t.opener, err = p.opener(ctx, t.host)
	return t, err
}

// opener returns gh if it is logged in to the host, and the API otherwise.
func (p Pulls) opener(ctx context.Context, host string) (opener, error) {
	if p.API == "" {
		if path, err := exec.LookPath("gh"); err == nil {
			gh := ghCLI{path}
			if _, err := gh.run(ctx, "", "auth", "status", "--hostname="+host); err == nil {
				return gh, nil
			} else if ctx.Err() != nil {
				return nil, err
			}
		}
	}
	var token secret.Value
	if p.Token != nil {
		var err error
		if token, err = p.Token(ctx, host); err != nil {
			return nil, err
		}
	}
	if token.Reveal() == "" {
		return nil, fail.New(fail.Secret, "no login for %s on this host", host).WithHint("gh auth login --hostname %s", host)
	}
	base := p.API
	switch {
	case base != "":
	case host == "github.com":
		base = "https://api.github.com"
	default:
		base = "https://" + host + "/api/v3"
	}
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || u.Scheme != "https" && !isLoopback(u) {
		return nil, fail.New(fail.Usage, "the API's URL must begin with https://, got %q", base)
	}
	return restAPI{strings.TrimSuffix(base, "/"), token}, nil
}

func isLoopback(u *url.URL) bool {
	ip := net.ParseIP(u.Hostname())
	return u.Scheme == "http" && ip != nil && ip.IsLoopback()
}

// maxAnswer limits what a pull request's host may answer, in bytes.
const maxAnswer = 1 << 20

// ghCLI opens pull requests with GitHub's gh, and its login.
type ghCLI struct{ path string }

// run runs gh outside of any repository, and returns its output.
func (g ghCLI) run(ctx context.Context, stdin string, args ...string) (string, error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, g.path, args...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "GH_PROMPT_DISABLED=1", "GH_NO_UPDATE_NOTIFIER=1", "NO_COLOR=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &pipe.Writer{W: &out, Left: maxAnswer}, &pipe.Writer{W: &errs, Left: 8 << 10, Cut: true}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", fail.New(fail.Failure, "gh %s %s: %s", args[0], args[1], termtext.Brief(cmp.Or(termtext.Line(errs.String()), err.Error()), 600)).WithHint("gh auth status")
	}
	return strings.TrimSpace(out.String()), nil
}

func (g ghCLI) find(ctx context.Context, t pullTarget, branch string) (string, error) {
	out, err := g.run(ctx, "", "pr", "list", "--repo="+t.host+"/"+t.slug, "--head="+branch, "--state=open", "--limit=1", "--json=url")
	if err != nil {
		return "", err
	}
	var found []struct {
		URL string `json:"url"`
	}
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		return "", fail.New(fail.Failure, "gh pr list: its output is not JSON")
	}
	if len(found) == 0 {
		return "", nil
	}
	return termtext.Line(found[0].URL), nil
}

func (g ghCLI) open(ctx context.Context, t pullTarget, branch, title, body string) (string, error) {
	out, err := g.run(ctx, body, "pr", "create", "--repo="+t.host+"/"+t.slug, "--head="+branch, "--base="+t.base, "--title="+title, "--body-file=-")
	lines := strings.Split(out, "\n")
	return termtext.Line(lines[len(lines)-1]), err
}

// restAPI opens pull requests with the API of GitHub, which others have as well.
type restAPI struct {
	base  string
	token secret.Value
}

// pullAnswer is the part of a pull request that is used.
type pullAnswer struct {
	URL string `json:"html_url"`
}

func (r restAPI) find(ctx context.Context, t pullTarget, branch string) (string, error) {
	owner, _, _ := strings.Cut(t.slug, "/")
	query := url.Values{"state": {"open"}, "head": {owner + ":" + branch}}
	var found []pullAnswer
	if err := r.call(ctx, http.MethodGet, "/repos/"+t.slug+"/pulls?"+query.Encode(), nil, &found); err != nil || len(found) == 0 {
		return "", err
	}
	return termtext.Line(found[0].URL), nil
}

func (r restAPI) open(ctx context.Context, t pullTarget, branch, title, body string) (string, error) {
	var made pullAnswer
	err := r.call(ctx, http.MethodPost, "/repos/"+t.slug+"/pulls", map[string]string{"title": title, "body": body, "head": branch, "base": t.base}, &made)
	return termtext.Line(made.URL), err
}

// call sends a request with the token, which no redirect carries elsewhere.
func (r restAPI) call(ctx context.Context, method, path string, body, answer any) error {
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		content = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, r.base+path, content)
	if err != nil {
		return errors.New("build API request: invalid URL") // err could quote the URL
	}
	req.Header.Set("Authorization", "Bearer "+r.token.Reveal())
	req.Header.Set("Accept", "application/vnd.github+json")
	req.Header.Set("Content-Type", "application/json")
	resp, err := login.Client.Do(req)
	if err != nil {
		return fail.New(fail.Host, "request to %s: %w", req.URL.Host, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fail.New(fail.Host, "request to %s: %w", req.URL.Host, err)
	}
	if resp.StatusCode/100 != 2 {
		var why struct {
			Message string `json:"message"`
		}
		_ = json.Unmarshal(text, &why) // the status is reported in any case
		return fail.New(fail.Failure, "%s returned %s: %s", req.URL.Host, resp.Status, termtext.Brief(termtext.Line(why.Message), 300))
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fail.New(fail.Failure, "%s did not return JSON", req.URL.Host)
	}
	return nil
}

// EnvToken returns the token that the environment has for the API of a host, under the names that gh uses.
func EnvToken(host string) secret.Value {
	names := []string{"GH_ENTERPRISE_TOKEN", "GITHUB_ENTERPRISE_TOKEN"}
	if host == "github.com" {
		names = []string{"GH_TOKEN", "GITHUB_TOKEN"}
	}
	for _, name := range names {
		if v := os.Getenv(name); v != "" {
			return secret.NewValue(v)
		}
	}
	return secret.Value{}
}
