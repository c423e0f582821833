package repo

import (
	"fmt"
	"net/url"
	"path"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Ref identifies a repository.
type Ref struct {
	Key    string `json:"key"`              // stable identity: "github.com/owner/repo" or "local:/abs/path"
	Slug   string `json:"slug"`             // display name: "owner/repo", or a directory's name
	URL    string `json:"url,omitempty"`    // the real remote, "" if a local repository has none
	Path   string `json:"path,omitempty"`   // the local clone, "" if there is none
	Branch string `json:"branch,omitempty"` // the requested branch, "" for the default
	Commit string `json:"commit,omitempty"` // to start from, full or abbreviated; "" for the branch's tip

	// PublicOnly is set if a client of the API chose the repository. It is then
	// fetched from public addresses only, and errors are reported without details.
	PublicOnly bool `json:"public_only,omitempty"`
}

const (
	maxRef   = 1024 // bytes of user input
	maxParts = 8    // levels of groups in a URL's path
)

var (
	hostName  = lazyregexp.New(`^[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$`)
	ownerName = lazyregexp.New(`^[A-Za-z0-9_][A-Za-z0-9_-]{0,38}$`)
	repoName  = lazyregexp.New(`^[A-Za-z0-9._][A-Za-z0-9._-]{0,99}$`)
	urlPart   = lazyregexp.New(`^[A-Za-z0-9._~+][A-Za-z0-9._~+-]{0,99}$`)
	filePath  = lazyregexp.New(`^/[A-Za-z0-9._~+@,=/-]*$`)
	userName  = lazyregexp.New(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$`)
	portNum   = lazyregexp.New(`^[1-9][0-9]{0,4}$`)
)

// Parse parses a repository named by the user: owner/repo[@branch], an https, ssh,
// git or file URL, git's user@host:path, or a local path, which starts with "." or
// "/". Relative paths start from cwd. A local clone with a remote has that remote's
// Key, because they are the same repository.
func Parse(s, cwd string) (Ref, error) {
	if err := printable(s); err != nil {
		return Ref{}, err
	}
	switch {
	case strings.HasPrefix(s, "-"):
		return Ref{}, refuse(s, "starts with a dash")
	case strings.Contains(s, "::"):
		return Ref{}, refuse(s, "git's remote helpers are not allowed")
	case hasDotDot(s):
		err := refuse(s, `".." is not allowed`)
		if isLocal(s) || s == ".." || strings.HasPrefix(s, "../") {
			_ = err.WithHint("agent-sessionizer open %s", filepath.Join(cwd, s))
		}
		return Ref{}, err
	case isLocal(s):
		if !filepath.IsAbs(s) {
			s = filepath.Join(cwd, s)
		}
		return parseLocal(filepath.Clean(s))
	case strings.Contains(s, "://"):
		return parseURL(s)
	case strings.Contains(s, ":"):
		return parseSCP(s)
	}
	return parseShort(s)
}

// KeyOf returns the Key of the repository that s names independently of the working
// directory: owner/repo at github.com, or a git URL. It returns "" for anything
// else.
func KeyOf(s string) string {
	ref, _ := ParseRemote(s)
	return ref.Key
}

// ParseRemote parses what KeyOf accepts. ok is false for anything else.
func ParseRemote(s string) (ref Ref, ok bool) {
	if isLocal(s) {
		return Ref{}, false
	}
	ref, err := Parse(s, "/")
	return ref, err == nil
}

// printable rejects strings that are invalid in every form of reference.
func printable(s string) error {
	if s == "" {
		return refuse(s, "is empty")
	}
	if len(s) > maxRef {
		return refuse(s, "is too long")
	}
	if !utf8.ValidString(s) {
		return refuse(s, "is not UTF-8")
	}
	if strings.IndexFunc(s, func(r rune) bool { return unicode.IsControl(r) || !unicode.IsPrint(r) }) >= 0 {
		return refuse(s, "contains invisible characters")
	}
	return nil
}

func isLocal(s string) bool {
	return s == "." || strings.HasPrefix(s, "./") || strings.HasPrefix(s, "/")
}

func hasDotDot(s string) bool {
	return s == ".." || strings.HasPrefix(s, "../") || strings.HasSuffix(s, "/..") || strings.Contains(s, "/../") ||
		!isLocal(s) && strings.Contains(s, "..")
}

func parseShort(s string) (Ref, error) {
	name, branch, hasBranch := strings.Cut(s, "@")
	parts := strings.Split(name, "/")
	if len(parts) >= 3 && strings.Contains(parts[0], ".") {
		if hasBranch && !ValidBranch(branch) {
			return Ref{}, refuse(s, "invalid branch name")
		}
		ref, err := parseURL("https://" + name)
		ref.Branch = branch
		return ref, err
	}
	if len(parts) != 2 {
		return Ref{}, refuse(s, "must be owner/repo, a git URL, or a path that starts with ./ or /")
	}
	owner, repo := parts[0], strings.TrimSuffix(parts[1], ".git")
	if !ownerName.MatchString(owner) || !repoName.MatchString(repo) || !fitPart(repo) {
		return Ref{}, refuse(s, "invalid repository name")
	}
	if hasBranch && !ValidBranch(branch) {
		return Ref{}, refuse(s, "invalid branch name")
	}
	ref := remote("github.com", []string{owner, repo}, "https://github.com/"+owner+"/"+repo+".git")
	ref.Branch = branch
	return ref, nil
}

func parseURL(s string) (Ref, error) {
	u, err := url.Parse(s)
	if err != nil {
		return Ref{}, refuse(s, "invalid URL")
	}
	scheme := strings.ToLower(u.Scheme)
	switch scheme {
	case "https", "ssh", "git", "file":
	case "http":
		return Ref{}, refuse(s, "must use https instead of http")
	default:
		return Ref{}, refuse(s, "only https, ssh, git and file URLs are allowed")
	}
	if u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.ContainsAny(s, "%#?") {
		return Ref{}, refuse(s, `"?", "#" and "%" are not allowed in a repository URL`)
	}
	user := ""
	if u.User != nil {
		_, secret := u.User.Password()
		if secret || scheme != "ssh" {
			return Ref{}, fail.New(fail.Secret, "%s: credentials in a URL would be written to disk", echo(s)).
				WithHint("git config --global credential.helper store # or: gh auth setup-git")
		}
		if user = u.User.Username(); !userName.MatchString(user) {
			return Ref{}, refuse(s, "invalid user name")
		}
		user += "@"
	}
	if scheme == "file" {
		return parseFile(s, u)
	}
	host, port := strings.ToLower(u.Hostname()), u.Port()
	if !validHost(host) || port != "" && !portNum.MatchString(port) || strings.HasSuffix(u.Host, ":") {
		return Ref{}, refuse(s, "invalid host name")
	}
	if port == map[string]string{"https": "443", "ssh": "22", "git": "9418"}[scheme] {
		port = ""
	}
	if port != "" {
		host += ":" + port
	}
	parts, err := pathParts(s, host, strings.TrimPrefix(u.Path, "/"))
	if err != nil {
		return Ref{}, err
	}
	return remote(host, parts, scheme+"://"+user+host+"/"+strings.Trim(u.Path, "/")), nil
}

// parseSCP parses git's short form of an ssh URL, [user@]host:path.
func parseSCP(s string) (Ref, error) {
	where, p, _ := strings.Cut(s, ":")
	user, host, hasUser := strings.Cut(where, "@")
	if !hasUser {
		user, host = "", where
	}
	if strings.Contains(p, "@") {
		return Ref{}, fail.New(fail.Secret, "%s: credentials in a URL would be written to disk", echo(s)).
			WithHint("ssh-add # and write git@HOST:OWNER/REPO")
	}
	host = strings.ToLower(host)
	if hasUser && !userName.MatchString(user) || !validHost(host) || !hasUser && !strings.Contains(host, ".") {
		return Ref{}, refuse(s, "must be user@host:path")
	}
	parts, err := pathParts(s, host, strings.TrimPrefix(p, "/"))
	if err != nil {
		return Ref{}, err
	}
	where = host
	if hasUser {
		where = user + "@" + host
	}
	return remote(host, parts, where+":"+strings.TrimSuffix(p, "/")), nil
}

// IsLocal reports whether the repository is a directory of a host.
func (r Ref) IsLocal() bool { return strings.HasPrefix(r.Key, "local:") }

func parseFile(s string, u *url.URL) (Ref, error) {
	p := path.Clean(u.Path)
	if u.Host != "" || u.User != nil || !filePath.MatchString(p) || p == "/" || strings.Contains(p, "/-") {
		return Ref{}, refuse(s, "must be file:///absolute/path")
	}
	return Ref{Key: "local:" + p, Slug: strings.TrimSuffix(path.Base(p), ".git"), URL: "file://" + p}, nil
}

// pathParts splits and checks a URL's path. It removes ".git" from the last part.
func pathParts(s, host, p string) ([]string, error) {
	parts := strings.Split(strings.TrimSuffix(p, "/"), "/")
	last := len(parts) - 1
	parts[last] = strings.TrimSuffix(parts[last], ".git")
	for _, part := range parts {
		if !urlPart.MatchString(part) || !fitPart(part) {
			return nil, refuse(s, "has no repository path")
		}
	}
	if len(parts) > maxParts || folds(host) && len(parts) < 2 || host == "github.com" && len(parts) != 2 {
		err := refuse(s, "has no repository path")
		if host == "github.com" && len(parts) > 2 {
			_ = err.WithHint("agent-sessionizer open %s/%s", parts[0], parts[1])
		}
		return nil, err
	}
	return parts, nil
}

func remote(host string, parts []string, url string) Ref {
	slug := strings.Join(parts, "/")
	key := slug
	if folds(host) {
		key = strings.ToLower(slug)
	}
	return Ref{Key: host + "/" + key, Slug: slug, URL: url}
}

// folds reports whether a host treats Owner/Repo and owner/repo as the same.
func folds(host string) bool {
	return host == "github.com" || host == "gitlab.com" || host == "bitbucket.org"
}

func validHost(h string) bool {
	return hostName.MatchString(h) && !strings.Contains(h, "..") && !strings.Contains(h, ".-") && !strings.Contains(h, "-.")
}

// fitPart rejects parts of a path with a special meaning: "." and "..", and ".git",
// which inside a path would put one mirror into another.
func fitPart(s string) bool {
	return !strings.HasSuffix(s, ".") && !strings.HasSuffix(strings.ToLower(s), ".git")
}

// ValidBranch reports whether s can be the branch in owner/repo@branch. It rejects the names
// that validRefName rejects, and those that have a meaning for a shell or an option parser.
func ValidBranch(s string) bool {
	return validRefName(s) && s != "HEAD" && s != "@" && !strings.HasPrefix(s, "-") &&
		!strings.HasPrefix(s, "refs/") && !strings.ContainsAny(s, "$`;|&<>\"'!") && len(s) <= 200
}

// validRefName applies git's check-ref-format to the part after "refs/heads/". It
// is stricter: the name must be printable and short enough for a file name.
func validRefName(s string) bool {
	if s == "" || len(s) > 400 || !utf8.ValidString(s) || strings.HasSuffix(s, ".") ||
		strings.Contains(s, "..") || strings.Contains(s, "@{") || strings.ContainsAny(s, " ~^:?*[\\") ||
		strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 {
		return false
	}
	for part := range strings.SplitSeq(s, "/") {
		if part == "" || len(part) > 200 || strings.HasPrefix(part, ".") || strings.HasPrefix(part, "-") ||
			strings.HasSuffix(foldName(part), ".lock") {
			return false
		}
	}
	return true
}

func refuse(s, why string) *fail.Error {
	return fail.New(fail.Usage, "repository %s: %s", echo(s), why).
		WithHint("agent-sessionizer open OWNER/REPO # or a git URL, ./path, /path")
}

// echo quotes user input without the part that may be a password.
func echo(s string) string {
	if i := strings.LastIndex(s, "@"); i >= 0 && strings.ContainsAny(s[:i], ":") {
		s = "…" + s[i:]
	}
	return fmt.Sprintf("%q", termtext.Brief(s, 80))
}
