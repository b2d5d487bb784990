//! Names that are made of a message's own: `events.{topic}`.

use std::borrow::Cow;

use crate::{Message, Target, TargetError};

/// A name with `{topic}`, `{type}` and `{tenant}` in it.
#[derive(Debug, Clone)]
pub(crate) struct Template(Option<String>);

impl Template {
    /// What the setting says; the topic itself where it says nothing.
    pub(crate) fn of(target: &Target, setting: &str) -> Result<Self, TargetError> {
        let Some(text) = target.setting(setting) else { return Ok(Self(None)) };
        let rest = ["{topic}", "{type}", "{tenant}"].iter().fold(text.to_owned(), |rest, name| rest.replace(name, ""));
        if text.is_empty() || rest.contains(['{', '}']) {
            return Err(TargetError(format!("{setting} knows {{topic}}, {{type}} and {{tenant}} only, not {rest}")));
        }
        Ok(Self(Some(text.to_owned())))
    }

    /// The name for a message.
    pub(crate) fn fill<'a>(&self, message: &'a Message) -> Cow<'a, str> {
        let Some(text) = &self.0 else { return Cow::Borrowed(&message.topic) };
        let mut name = String::with_capacity(text.len() + message.topic.len());
        let mut rest = text.as_str();
        // One pass: what a message brings is never taken for a placeholder.
        while let Some((before, after)) = rest.split_once('{') {
            name.push_str(before);
            let (placeholder, after) = after.split_once('}').unwrap_or((after, ""));
            name.push_str(match placeholder {
                "topic" => &message.topic,
                "type" => &message.kind,
                _ => &message.tenant,
            });
            rest = after;
        }
        name.push_str(rest);
        Cow::Owned(name)
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_filled_once() {
        let message = Message { topic: "{type}".into(), kind: "created".into(), ..Message::default() };
        let named = |url: &str| {
            let target = Target::parse(url, &["subject"]).expect("a URL");
            Template::of(&target, "subject").map(|template| template.fill(&message).into_owned())
        };
        assert_eq!(named("nats://h").as_deref(), Ok("{type}"));
        assert_eq!(named("nats://h?subject=a.{topic}.{type}.z").as_deref(), Ok("a.{type}.created.z"));
        assert!(named("nats://h?subject={key}").is_err());
        assert!(named("nats://h?subject=").is_err());
    }
}
