package repo

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

func fetchPauses() backoff.BackOff {
	return &backoff.ExponentialBackOff{InitialInterval: 5 * time.Second, Multiplier: 2, RandomizationFactor: 0.15, MaxInterval: time.Minute}
}

// retry calls f until it succeeds, fails permanently, or has been tried often enough.
func (m *Mirrors) retry(ctx context.Context, attempts uint, p Progress, f func() error) error {
	pauses := fetchPauses
	if m.Pauses != nil {
		pauses = m.Pauses
	}
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		err := f()
		if err != nil && !transient(err) {
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(pauses()), backoff.WithMaxTries(attempts), backoff.WithNotify(func(err error, d time.Duration) {
		p.report("%v; retrying in %s", err, d.Round(100*time.Millisecond))
	}))
	return err
}

// Messages of git, curl and ssh, in the order in which they are matched: a refused
// login also ends in "Could not read from remote repository".
var (
	hostKeyErrors = lazyregexp.New(`Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED`)
	loginErrors   = lazyregexp.New(`(?i)Authentication failed|could not read (Username|Password)|terminal prompts disabled|` +
		`Permission denied \(|Invalid username or|HTTP Basic: Access denied|returned error: 40[13]|Permission to .* denied`)
	notFoundErrors = lazyregexp.New(`(?i)repository .*not found|returned error: 404|not found: did you run git update-server-info|` +
		`does not appear to be a git repository|does not exist|access denied or repository not exported|could not be found|no such (repository|project)`)
	tooLargeErrors = lazyregexp.New(`(?i)file too large`) // EFBIG, from the limits of a cage

	diskFullErrors  = lazyregexp.New(`(?i)no space left|disk quota exceeded`)
	transientErrors = lazyregexp.New(`(?i)could not resolve|name resolution|connection (refused|reset|timed out|closed|was reset)|timed out|timeout|` +
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
