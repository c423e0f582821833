package config

import "github.com/agent-sessionizer/agent-sessionizer/pkg/login"

// Logins names the subscription logins of this host that sessions use. A nil Logins is inherited;
// an empty one is none.
type Logins []LoginName

// LoginName is the name of a login.Provider.
type LoginName string

// Set parses a name.
func (n *LoginName) Set(text string) error {
	p, err := login.Find(text)
	*n = LoginName(p.Name)
	return err
}
