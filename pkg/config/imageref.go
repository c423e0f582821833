package config

import (
	"net/url"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// digestMark separates a location from its digest.
const digestMark = "#sha256:"

const maxImageRef = 2000 // bytes

var (
	imageName = lazyregexp.New(`^[a-z0-9][a-z0-9.]{0,63}$`)
	hexSHA256 = lazyregexp.New(`^[0-9a-f]{64}$`)
)

// ImageRef identifies the image that sessions start from: an image in the store, or the
// user's own cloud image.
type ImageRef struct {
	Name     string // "ubuntu", "debian"; "" for the user's own cloud image
	Location string // an absolute path, or a URL
	Digest   string // "sha256:…"; never empty for a URL
}

// ParseImageRef parses NAME, PATH, PATH#sha256:HEX or URL#sha256:HEX. A path contains a
// slash. A relative path is resolved against dir; if dir is "", it is an error.
func ParseImageRef(text, dir string) (ImageRef, error) {
	if len(text) > maxImageRef || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return ImageRef{}, fail.New(fail.Usage, "image: must be at most %d bytes without control characters", maxImageRef)
	}
	if !strings.Contains(text, "/") {
		if !imageName.MatchString(text) {
			return ImageRef{}, fail.New(fail.Usage, "image %q: must be a name like ubuntu, a path with a slash, or a URL with a digest", text).
				WithHint("agent-sessionizer image list")
		}
		return ImageRef{Name: text}, nil
	}
	r := ImageRef{Location: text}
	if at := strings.LastIndex(text, digestMark); at >= 0 {
		hex := strings.ToLower(text[at+len(digestMark):])
		if !hexSHA256.MatchString(hex) {
			return ImageRef{}, fail.New(fail.Usage, "image: the digest must be %s and 64 hexadecimal digits, got %q", digestMark, text[at:])
		}
		r.Location, r.Digest = text[:at], "sha256:"+hex
	}
	if strings.Contains(r.Location, "://") {
		return r, r.checkURL()
	}
	path, err := expandHome(r.Location)
	if err != nil {
		return ImageRef{}, fail.New(fail.Usage, "image %q: expand ~: HOME is not set", text)
	}
	if !filepath.IsAbs(path) {
		if dir == "" {
			return ImageRef{}, fail.New(fail.Usage, "image %q: must be an absolute path, or one that starts with ~/", text)
		}
		path = filepath.Join(dir, path)
	}
	r.Location = path
	return r, nil
}

// checkURL rejects a URL that could not be downloaded, or whose content no digest verifies.
func (r ImageRef) checkURL() error {
	u, err := url.Parse(r.Location)
	switch {
	case err != nil || u.Host == "" || u.Fragment != "" || u.Scheme != "https" && u.Scheme != "http":
		return fail.New(fail.Usage, "image %q: must be an https:// or http:// URL, followed by %s and its digest", r.Location, digestMark)
	case u.User != nil:
		return fail.New(fail.Usage, "image: the URL on host %s must not contain a user or password", u.Host)
	case r.Digest == "":
		return fail.New(fail.Usage, "image %q: a URL must end in %s and the image's digest", r.Location, digestMark).
			WithHint("curl -fL '%s' | sha256sum", strings.ReplaceAll(r.Location, "'", "%27"))
	}
	return nil
}

// String returns a text from which ParseImageRef reads the same image, independent of the
// working directory.
func (r ImageRef) String() string {
	if r.Name != "" || r.Digest == "" {
		return r.Name + r.Location
	}
	return r.Location + "#" + r.Digest
}

// IsURL reports whether the image is downloaded.
func (r ImageRef) IsURL() bool { return strings.Contains(r.Location, "://") }
