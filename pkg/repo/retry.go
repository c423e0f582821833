package repo

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/url"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Retry controls how often and when a failed clone is retried. The zero value means
// three retries, after 5, 10 and 20 seconds, plus or minus 15 %.
type Retry struct {
	Times int                                              // 0 means 3, negative means never
	First time.Duration                                    // 0 means 5 s; doubled each time
	Cap   time.Duration                                    // 0 means 60 s
	Sleep func(ctx context.Context, d time.Duration) error // nil waits
	Rand  func() float64                                   // nil means math/rand; returns values in [0, 1)
}

const jitter = 0.15

// delay returns how long to wait before retry n, counted from 0.
func (r Retry) delay(n int) time.Duration {
	first, limit, random := r.First, r.Cap, r.Rand
	if first == 0 {
		first = 5 * time.Second
	}
	if limit == 0 {
		limit = time.Minute
	}
	if random == nil {
		random = rand.Float64
	}
	d := min(first<<min(n, 20), limit)
	return min(time.Duration(float64(d)*(1+jitter*(2*random()-1))), limit)
}

// do calls f until it succeeds, fails permanently, or has been retried often
// enough.
func (r Retry) do(ctx context.Context, times int, p Progress, f func() error) error {
	for n := 0; ; n++ {
		err := f()
		if err == nil || n == times || !transient(err) || ctx.Err() != nil {
			return err
		}
		d := r.delay(n)
		p.report("%v; retrying in %s", err, d.Round(100*time.Millisecond))
		if err := r.sleep(ctx, d); err != nil {
			return err
		}
	}
}

func (r Retry) sleep(ctx context.Context, d time.Duration) error {
	if r.Sleep != nil {
		return r.Sleep(ctx, d)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Messages of git, curl and ssh, in the order in which they are matched: a refused
// login also ends in "Could not read from remote repository".
var (
	hostKeyErrors = lazily(`Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED`)
	loginErrors   = lazily(`(?i)Authentication failed|could not read (Username|Password)|terminal prompts disabled|` +
		`Permission denied \(|Invalid username or|HTTP Basic: Access denied|returned error: 40[13]|Permission to .* denied`)
	notFoundErrors = lazily(`(?i)repository .*not found|returned error: 404|not found: did you run git update-server-info|` +
		`does not appear to be a git repository|does not exist|access denied or repository not exported|could not be found|no such (repository|project)`)
	tooLargeErrors = lazily(`(?i)file too large`) // EFBIG, from the limits of a cage

	diskFullErrors  = lazily(`(?i)no space left|disk quota exceeded`)
	transientErrors = lazily(`(?i)could not resolve|name resolution|connection (refused|reset|timed out|closed|was reset)|timed out|timeout|` +
		`unreachable|no route to host|early EOF|RPC failed|unexpected disconnect|hung up|returned error: (5[0-9][0-9]|429|408)|` +
		`gnutls|SSL_|TLS|kex_exchange|curl [0-9]+|Empty reply|broken pipe|the remote end|Failed to connect|unable to connect|couldn't find remote ref|not our ref|unadvertised object|invalid index-pack output`)
)

// Transient reports whether a failed Ensure may succeed when it is repeated.
func Transient(err error) bool { return transient(err) }

// transient reports whether a failed git may succeed when it is repeated.
func transient(err error) bool {
	ge, ok := errors.AsType[*gitError](err)
	return ok && !hostKeyErrors.MatchString(ge.stderr) && !loginErrors.MatchString(ge.stderr) &&
		!notFoundErrors.MatchString(ge.stderr) && !diskFullErrors.MatchString(ge.stderr) && transientErrors.MatchString(ge.stderr)
}

// explain adds a code and a hint to the error of a failed contact with a remote.
func explain(ref Ref, err error) error {
	ge, ok := errors.AsType[*gitError](err)
	if !ok {
		return err
	}
	host := remoteHost(ref.URL)
	switch text := ge.stderr; {
	case hostKeyErrors.MatchString(text):
		return fail.New(fail.Secret, "%s: the host key of %s is unknown or has changed: %w", ref.Slug, host, err).
			WithHint("ssh -T git@%s", host)
	case loginErrors.MatchString(text):
		e := fail.New(fail.Secret, "%s: %s refused the login, or the repository does not exist: %w", ref.Slug, host, err)
		if host == "github.com" {
			return e.WithHint("gh auth login && gh auth setup-git")
		}
		return e.WithHint("git ls-remote %s", ref.URL)
	case notFoundErrors.MatchString(text):
		return fail.New(fail.NotFound, "%s: the repository does not exist at %s: %w", ref.Slug, host, err).
			WithHint("git ls-remote %s", ref.URL)
	case diskFullErrors.MatchString(text):
		return fail.New(fail.Host, "%s: %w", ref.Slug, err).WithHint("df -h")
	}
	return fail.New(fail.Failure, "%s: %w", ref.Slug, err).WithHint("git ls-remote %s", ref.URL)
}

func remoteHost(raw string) string {
	if u, err := url.Parse(raw); err == nil && strings.Contains(raw, "://") {
		if u.Host == "" {
			return "this host"
		}
		return u.Hostname()
	}
	where, _, _ := strings.Cut(raw, ":")
	return where[strings.LastIndex(where, "@")+1:]
}
